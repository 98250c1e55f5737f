{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- define "ebpflb.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "ebpflb.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
{{- end }}

{{- define "ebpflb.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- /* Address and port of "0.0.0.0:10256", "[::]:10256", "0.0.0.0", "::" or "". */ -}}
{{- define "ebpflb.port" -}}
{{- if regexMatch "^[^:]+:[0-9]+$|]:[0-9]+$" .bound }}{{ splitList ":" .bound | last }}{{ else }}{{ .usual }}{{ end }}
{{- end }}

{{- define "ebpflb.address" -}}
{{ regexReplaceAll "^([^:]+):[0-9]+$|^\\[(.+)]:[0-9]+$" . "${1}${2}" }}
{{- end }}

{{- /* An HTTP probe of one path at an address; at the node's own if that is unspecified. */ -}}
{{- define "ebpflb.probe" -}}
{{- $address := include "ebpflb.address" .bound -}}
httpGet:
  path: {{ .path }}
  port: {{ include "ebpflb.port" (dict "bound" .bound "usual" 10256) }}
  {{- if not (has $address (list "" "0.0.0.0" "::")) }}
  host: {{ $address | quote }}
  {{- end }}
periodSeconds: 10
timeoutSeconds: 5
{{- end }}

{{- /* Root, because the host's files that it writes belong to root; but with few capabilities.
Takes the root's values, whether raw sockets are needed, and whether netfilter is probed for another
container. */ -}}
{{- define "ebpflb.securityContext" -}}
runAsUser: 0
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  add:
    - BPF # maps and programs
    - NET_ADMIN # programs at sockets and devices, sysctls of the network
    - PERFMON # the verifier lets programs compute with pointers
    {{- if .Values.rights.lockMemory }}
    - SYS_RESOURCE # before Linux 5.11: raises RLIMIT_MEMLOCK for the maps
    {{- end }}
    {{- if or .Values.rights.enterPods .probes }}
    - SYS_ADMIN # network namespaces: setns(2) into pods', one in which netfilter is probed
    {{- end }}
    {{- if .raw }}
    - NET_RAW # iptables-legacy, which removes kube-proxy's rules; frames of the segment, for l2Pools and handOver
    {{- end }}
seccompProfile:
  {{- toYaml .Values.rights.seccompProfile | nindent 2 }}
appArmorProfile:
  {{- .Values.rights.appArmorProfile | default (dict "type" "Unconfined") | toYaml | nindent 2 }}
seLinuxOptions:
  level: s0
  type: spc_t
{{- end }}

{{- define "ebpflb.volumeMounts" -}}
- name: config
  mountPath: /etc/ebpflb
  readOnly: true
# Maps and links are pinned here: they serve while no agent runs.
- name: bpffs
  mountPath: /sys/fs/bpf
  mountPropagation: HostToContainer
# Programs are attached to the root of cgroup v2, which on hybrid hosts is below this directory.
- name: cgroup
  mountPath: /sys/fs/cgroup
  readOnly: true
# A container cannot write its own /proc/sys.
- name: sysctls
  mountPath: /host/proc/sys/net
- name: run
  mountPath: /run/ebpflb
- name: cache
  mountPath: /var/cache/ebpflb
{{- if .Values.rights.enterPods }}
- name: netns
  mountPath: /run/netns
  mountPropagation: HostToContainer
  readOnly: true
{{- end }}
- name: tmp
  mountPath: /tmp
{{- if eq .Values.cleanup "kube-proxy" }}
- name: xtables-lock
  mountPath: /run/xtables.lock
{{- end }}
{{- end }}

{{- /* Of `ebpflb ui`: it reads what the agent has pinned, and loads explain's programs. */ -}}
{{- define "ebpflb.uiSecurityContext" -}}
runAsUser: 0
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  add:
    - BPF # reads maps; loads explain's programs, which are attached nowhere
    - NET_ADMIN # conntrack; explain's programs
    - PERFMON # the verifier lets programs compute with pointers
    {{- if .Values.rights.lockMemory }}
    - SYS_RESOURCE # before Linux 5.11: explain's private maps count against RLIMIT_MEMLOCK
    {{- end }}
    {{- if .Values.rights.enterPods }}
    - SYS_ADMIN # setns(2): explain asks as a pod, or by an address that a pod may have
    {{- end }}
seccompProfile:
  {{- toYaml .Values.rights.seccompProfile | nindent 2 }}
appArmorProfile:
  {{- .Values.rights.appArmorProfile | default (dict "type" "Unconfined") | toYaml | nindent 2 }}
seLinuxOptions:
  level: s0
  type: spc_t
{{- end }}

{{- define "ebpflb.uiVolumeMounts" -}}
- name: bpffs
  mountPath: /sys/fs/bpf
  mountPropagation: HostToContainer
  readOnly: true
- name: cgroup
  mountPath: /sys/fs/cgroup
  readOnly: true
- name: run
  mountPath: /run/ebpflb
  readOnly: true
- name: cache
  mountPath: /var/cache/ebpflb
  readOnly: true
{{- if .Values.rights.enterPods }}
- name: netns
  mountPath: /run/netns
  mountPropagation: HostToContainer
  readOnly: true
{{- end }}
- name: tmp
  mountPath: /tmp
# In place of the service account's token, which Kubernetes then does not mount here.
- name: no-token
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- if .Values.ui.tokenSecret }}
- name: ui-token
  mountPath: /etc/ebpflb-ui
  readOnly: true
{{- end }}
{{- end }}
