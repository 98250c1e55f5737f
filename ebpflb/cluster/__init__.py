# SPDX-License-Identifier: Apache-2.0
"""What the cluster says: the Kubernetes API or a directory of manifests, told as the same events.

The way of an object, from either end:

api        the one door to ``kubernetes``: a page of a list, the lines of a watch, as bytes
watching   list, then watch, then watch again: the API as a source
manifests  a directory under inotify: files as a source
folder     what the files say together, and which events a changed file is worth
documents  one file -> its documents -> objects, the bad ones named
decoding   bytes or YAML values -> the objects of ``model``, only the fields that we read
selectors  which objects concern us: asked of the API, applied here to manifests
recorder   what we tell the cluster: events about the Node and its Services
running    one turn after the other for ever: trouble is told once, and paused after
pacing     how long to wait, for what
source     what every source can do, and all that the agent needs to know
"""
