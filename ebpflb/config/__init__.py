# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's configuration: from a file or flags to the fields of ``ebpflb.options.Options``.

The modules in the order in which a value passes them (``ebpflb.cli`` reads the flags):

parameters        every flag and field of kube-proxy: its help, and whether it has an effect here
config_file       the file -> plain values -> fields; unknown, duplicate and mistyped fields
fields            KubeProxyConfiguration v1alpha1 with its defaults, and fields by their path
validation        all invalid values, by kube-proxy's rules
translation       fields -> Options
watch             changes of the file while the agent runs
families          once the Node is known: addresses of a family that the node does not have
listen_addresses  default addresses and ports of healthzBindAddress and metricsBindAddress
"""
