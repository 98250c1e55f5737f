# SPDX-License-Identifier: Apache-2.0
"""The page of `ebpflb ui`: the values of the commands over HTTP, and a page that shows them.

Nothing here is imported unless the command runs, as starlette and uvicorn are an extra. static/ has
the page: files that browsers read as they are.

web_server   the process, which requests are answered at all, and slow connections
application  which path gives which value, and the parameters of a request
answering    values as JSON, errors as sentences; threads that read, a limited number at a time
readings     the values, read by the tools of the commands; the sorted and filtered Services
live_events  the datapath's decisions, live
rate_meter   rates of the last minutes, measured while someone looks
rates        of services and backends, from their counters
"""
