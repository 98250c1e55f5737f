# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's configuration: from a file or flags to the fields of ``ebpflb.options.Options``.

The modules in the order in which a value passes them (``ebpflb.cli`` reads the flags):

parameters   every flag and field of kube-proxy: its help, and whether it has an effect here
config_file  the file -> plain values -> fields, and changes of the file while the agent runs
fields       KubeProxyConfiguration v1alpha1 with its defaults, and fields by their path
validation   all invalid values, by kube-proxy's rules; once the Node is known, wrong families
translation  fields -> Options
"""
