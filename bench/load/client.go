// SPDX-License-Identifier: Apache-2.0
// As the clients of bench/http_program.py, with net/http: go run client.go URL SECONDS WORKERS
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

func main() {
	seconds, _ := strconv.ParseFloat(os.Args[2], 64)
	workers, _ := strconv.Atoi(os.Args[3])
	end := time.Now().Add(time.Duration(seconds * float64(time.Second)))
	var all sync.WaitGroup
	var lock sync.Mutex
	count, failed := 0, map[string]string{}
	for i := 0; i < workers; i++ {
		all.Add(1)
		go func() {
			defer all.Done()
			client := &http.Client{Transport: &http.Transport{}}
			for time.Now().Before(end) {
				time.Sleep(100*time.Millisecond + time.Duration(rand.Intn(4900))*time.Millisecond)
				number := fmt.Sprintf("%x", rand.Uint64())
				response, err := client.Post(os.Args[1]+"/"+number, "text/plain", strings.NewReader("x"))
				if err == nil {
					_, err = io.ReadAll(response.Body)
					response.Body.Close()
				}
				lock.Lock()
				count++
				if err != nil {
					failed[number] = err.Error()
				}
				lock.Unlock()
			}
		}()
	}
	all.Wait()
	json.NewEncoder(os.Stdout).Encode(map[string]any{"count": count, "failed": failed})
}
