# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's configuration, as kube-proxy takes it: a file or flags in, Settings out.

``durations``    Go's "1h0m0s"
``fields``       KubeProxyConfiguration v1alpha1: defaults, and a field by its path
``table``        every flag and field: what it is for, and what becomes of it here
``addresses``    HOST:PORT, completed as kube-proxy does
``config_file``  a configuration file -> fields; unknown and duplicate fields, and all errors
``validation``   fields that make no sense, all at once (kube-proxy.md 15)
``families``     addresses that do not fit this node's families
``translation``  fields -> what the agent does
``watch``        the file, while we run
"""
