# SPDX-License-Identifier: Apache-2.0
"""Sources of objects: the Kubernetes API or a directory of manifests, both as the same events.

source              the interface of every source, and the source that the options name

The Kubernetes API:

list_watch      list, watch, and resume the watch
api             requests to the API server
api_servers     which of several API servers is asked
access          its address, TLS and credentials, as a pod has them
kubeconfig      the same from a kubeconfig
balanced_services  all Services with their addresses, and writes of an address
event_recorder  Kubernetes events about the Node and its Services, sent to the API server

A directory of manifests:

manifests       files -> objects -> events, followed with inotify

Both:

decoding        JSON or YAML values -> the objects of ``model``
"""
