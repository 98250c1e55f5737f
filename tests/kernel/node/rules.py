# SPDX-License-Identifier: Apache-2.0
"""Rules of a node as iptables-restore takes them: kube-proxy's by mode, and its neighbours'.

In the words of iptables-save, cut short. {net} and {pod} begin an address of the family, {all}
is the length of one.
"""

FAMILIES = {
    "iptables": {"net": "10.96.0.", "pod": "10.244.1.", "all": "32", "some": "24", "icmp": "icmp"},
    "ip6tables": {
        "net": "fd00:96::",
        "pod": "fd00:244:1::",
        "all": "128",
        "some": "120",
        "icmp": "ipv6-icmp",
    },
}

# kubelet: 1.31, and the nat part that it had until 1.28.
KUBELET = """
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-DROP - [0:0]
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -m comment --comment "kubernetes firewall for dropping marked packets" -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
"""  # noqa: E501

# The CNI plugin portmap, for a pod with a hostPort.
PORTMAP = """
*nat
:CNI-DN-2d0a7bb8c4f3a5d0f2c1e - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A CNI-DN-2d0a7bb8c4f3a5d0f2c1e -s {pod}0/{some} -p tcp -m tcp --dport 8081 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-2d0a7bb8c4f3a5d0f2c1e -p tcp -m tcp --dport 8081 -j RETURN
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \\"cbr0\\" id: \\"2d0a\\" -j KUBE-SERVICES" -m multiport --dports 8081 -j CNI-DN-2d0a7bb8c4f3a5d0f2c1e
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
COMMIT
"""  # noqa: E501

# The same with externalSetMarkChain: KUBE-MARK-MASQ.
MARKING_PORTMAP = """
*nat
:CNI-DN-77aa0c - [0:0]
-A CNI-DN-77aa0c -s {pod}0/{some} -p tcp -m tcp --dport 8082 -j KUBE-MARK-MASQ
COMMIT
"""

CALICO = """
*filter
:cali-FORWARD - [0:0]
:cali-INPUT - [0:0]
-A INPUT -m comment --comment "cali:Cz_u1IQiXIMmKD4c" -j cali-INPUT
-A FORWARD -m comment --comment "cali:wUHhoiAYhphO9Mso" -j cali-FORWARD
-A FORWARD -m comment --comment "cali:S93hcgKJrXEqnTfs" -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-FORWARD -i cali+ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-INPUT -p tcp -m comment --comment "cali:abc KUBE-SERVICES" -m tcp --dport 30080 -j MARK --set-xmark 0x10000/0x10000
COMMIT
*nat
:cali-nat-outgoing - [0:0]
-A POSTROUTING -m comment --comment "cali:O3lYWMrLQYEMJtB5" -j cali-nat-outgoing
-A cali-nat-outgoing -s {pod}0/{some} ! -d {pod}0/{some} -j MASQUERADE
COMMIT
"""  # noqa: E501

UFW = """
*filter
:ufw-before-input - [0:0]
:ufw-user-input - [0:0]
-A INPUT -j ufw-before-input
-A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-input -m conntrack --ctstate INVALID -j DROP
-A ufw-before-input -p {icmp} -j ACCEPT
-A ufw-before-input -j ufw-user-input
-A ufw-user-input -p tcp -m tcp --dport 22 -j ACCEPT
-A ufw-user-input -p tcp -m multiport --dports 30000:32767 -j ACCEPT
COMMIT
"""

# Of an operator who calls chains as kube-proxy does, but not quite.
OPERATOR = """
*filter
:KUBE-FW-OPERATOR - [0:0]
:KUBE-SVC - [0:0]
-A INPUT -s {net}99/{all} -j KUBE-FW-OPERATOR
-A KUBE-FW-OPERATOR -j ACCEPT
COMMIT
"""

NEIGHBOURS = (KUBELET, PORTMAP, CALICO, UFW, OPERATOR)

# 1.36, one service with a NodePort and source ranges, one without endpoints.
IPTABLES_MODE = """
*mangle
:KUBE-PROXY-CANARY - [0:0]
COMMIT
*filter
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-PROXY-FIREWALL -d {net}200/{all} -p tcp -m comment --comment "default/web:http traffic not accepted by KUBE-FW-ZTJ5SYOBFAZQXTQF" -m tcp --dport 80 -j DROP
-A KUBE-SERVICES -d {net}44/{all} -p tcp -m comment --comment "default/none has no endpoints" -m tcp --dport 80 -j REJECT
COMMIT
*nat
:KUBE-EXT-ZTJ5SYOBFAZQXTQF - [0:0]
:KUBE-FW-ZTJ5SYOBFAZQXTQF - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SEP-2ACZ7VJ4SLNY7XTQ - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-ZTJ5SYOBFAZQXTQF - [0:0]
:KUBE-SVL-ZTJ5SYOBFAZQXTQF - [0:0]
:KUBE-XLB-ZTJ5SYOBFAZQXTQF - [0:0]
-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-EXT-ZTJ5SYOBFAZQXTQF -m comment --comment "masquerade traffic for default/web:http external destinations" -j KUBE-MARK-MASQ
-A KUBE-EXT-ZTJ5SYOBFAZQXTQF -j KUBE-SVC-ZTJ5SYOBFAZQXTQF
-A KUBE-FW-ZTJ5SYOBFAZQXTQF -s {net}0/{some} -m comment --comment "default/web:http loadbalancer IP" -j KUBE-EXT-ZTJ5SYOBFAZQXTQF
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODEPORTS -p tcp -m comment --comment "default/web:http" -m tcp --dport 30080 -j KUBE-EXT-ZTJ5SYOBFAZQXTQF
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE
-A KUBE-SEP-2ACZ7VJ4SLNY7XTQ -s {pod}11/{all} -m comment --comment "default/web:http" -j KUBE-MARK-MASQ
-A KUBE-SEP-2ACZ7VJ4SLNY7XTQ -p tcp -m comment --comment "default/web:http" -m tcp -j DNAT --to-destination {pod}11
-A KUBE-SERVICES -d {net}10/{all} -p tcp -m comment --comment "default/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-ZTJ5SYOBFAZQXTQF
-A KUBE-SERVICES -d {net}200/{all} -p tcp -m comment --comment "default/web:http loadbalancer IP" -m tcp --dport 80 -j KUBE-FW-ZTJ5SYOBFAZQXTQF
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-ZTJ5SYOBFAZQXTQF ! -s {pod}0/{some} -d {net}10/{all} -p tcp -m comment --comment "default/web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-ZTJ5SYOBFAZQXTQF -m comment --comment "default/web:http -> endpoint" -j KUBE-SEP-2ACZ7VJ4SLNY7XTQ
COMMIT
"""  # noqa: E501

# Its sets have other names for IPv6; {set} is what theirs begin with.
IPVS_MODE = """
*mangle
:KUBE-PROXY-CANARY - [0:0]
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
-I INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
-I INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-I INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
-I FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-I OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
-A KUBE-IPVS-FILTER -m set --match-set {set}LOAD-BALANCER dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set {set}CLUSTER-IP dst,dst -j RETURN
-A KUBE-NODE-PORT -m comment --comment "Kubernetes health check node port" -m set --match-set {set}HEALTH-CHECK-NODE-PORT dst -j ACCEPT
-A KUBE-PROXY-FIREWALL -m set --match-set {set}LOAD-BALANCER dst,dst -j KUBE-SOURCE-RANGES-FIREWALL
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
COMMIT
*nat
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODE-PORT -p tcp -m comment --comment "Kubernetes nodeport TCP port for masquerade purpose" -m set --match-set {set}NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-POSTROUTING -m comment --comment "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose" -m set --match-set {set}LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE
-A KUBE-SERVICES -m comment --comment "Kubernetes service lb portal" -m set --match-set {set}LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
-A KUBE-SERVICES -m comment --comment "Kubernetes service cluster ip + port for masquerade purpose" -m set --match-set {set}CLUSTER-IP src,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
COMMIT
"""  # noqa: E501

IPVS_SETS = {
    "LOOP-BACK": "hash:ip,port,ip",
    "CLUSTER-IP": "hash:ip,port",
    "LOAD-BALANCER": "hash:ip,port",
    "NODE-PORT-TCP": "bitmap:port",
    "HEALTH-CHECK-NODE-PORT": "bitmap:port",
}

NFTABLES_MODE = """
table {family} kube-proxy {{
  comment "rules for kube-proxy"
  map service-nodeports {{
    type inet_proto . inet_service : verdict
    elements = {{ tcp . 30080 : goto external-ZTJ5SYOB-default/web/tcp/http }}
  }}
  chain services {{
    meta l4proto . th dport vmap @service-nodeports
  }}
  chain external-ZTJ5SYOB-default/web/tcp/http {{
    mark set mark or 0x4000
    meta l4proto tcp dnat to {where}:8080
  }}
  chain nat-prerouting {{
    type nat hook prerouting priority dstnat; policy accept;
    jump services
  }}
}}
table inet operator {{
  chain kube-proxy {{
    tcp dport 30080 counter accept
  }}
}}
table {family} kube-proxy-of-mine {{
}}
"""
