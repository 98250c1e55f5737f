# SPDX-License-Identifier: Apache-2.0
"""The page of `ebpflb ui`: the values of the commands over HTTP, and a page that shows them.

Nothing here is imported unless the command runs, as starlette and uvicorn are an extra. static/ has
the page: files that browsers read as they are.

web_server       the process: a socket, uvicorn, and connections that hold it for too long
application      which path gives which value, and what a request asks for
guard            which requests are answered at all, and what every response has
request_workers  threads that read, so many at a time
answering        values as JSON, errors as sentences
paced            a value that all clients share, read now and then
readings         the values, by the tools that the commands ask
live_events      what the datapath decides, as it does
service_list     all Services, sorted and filtered
rate_meter       rates of the last minutes, measured while somebody looks
"""
