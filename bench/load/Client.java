// SPDX-License-Identifier: Apache-2.0
// As the clients of bench/http_program.py, with java.net.http: java Client.java URL SECONDS WORKERS
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.Collectors;

class Client {
    public static void main(String[] words) throws Exception {
        System.setProperty("jdk.httpclient.keepalive.timeout", "3600");
        var end = System.nanoTime() + (long) (Double.parseDouble(words[1]) * 1e9);
        var count = new AtomicInteger();
        Map<String, String> failed = new ConcurrentHashMap<>();
        var threads = new Thread[Integer.parseInt(words[2])];
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(() -> work(words[0], end, count, failed));
            threads[i].start();
        }
        for (var each : threads) each.join();
        var told = failed.entrySet().stream()
            .map(it -> "\"" + it.getKey() + "\": \"" + it.getValue().replace('"', ' ') + "\"")
            .collect(Collectors.joining(", "));
        System.out.println("{\"count\": " + count + ", \"failed\": {" + told + "}}");
    }

    static void work(String url, long end, AtomicInteger count,
                     Map<String, String> failed) {
        var client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        var random = new Random();
        while (System.nanoTime() < end) {
            var number = Long.toHexString(random.nextLong());
            try {
                Thread.sleep(100 + random.nextInt(4900));
                client.send(HttpRequest.newBuilder(URI.create(url + "/" + number))
                    .POST(HttpRequest.BodyPublishers.ofString("x")).build(),
                    HttpResponse.BodyHandlers.ofString());
            } catch (Exception error) {
                failed.put(number, error.toString());
            }
            count.incrementAndGet();
        }
    }
}
