# SPDX-License-Identifier: Apache-2.0
"""Which rules of netfilter do not see services as they would beside kube-proxy: docs/firewalls.md.

A rule is compared with what each service's requests look like at its hook, before ebpflb and now
(``views``). All but ``survey`` is pure.

survey           reads the rules of the node and of its pods, and returns the findings
rule_search      walks the chains and compares rule by rule
per_packet       rules for each packet, which --fast-forward leads established flows past
earlier          what the rules before one leave of the packets in its chain
advice           a finding in words, with what to do instead
views            what a request looks like at a hook, with each engine
service_traffic  the frontends and endpoints whose requests are translated
rules            tables, chains and rules, whichever tool has printed them
matches          what a rule asks of a packet
nft_parser       reads what nft -j prints
nft_match        reads one match of a rule of nft
nft_each         reads what a rule of nft does with each packet of a connection
iptables_parser  reads what iptables-save prints
ipset            reads what ipset save prints
"""
