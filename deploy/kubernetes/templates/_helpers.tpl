{{- define "name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "labels" -}}
app.kubernetes.io/name: tokenmill
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* What a worker and a front end prove themselves to each other with. */}}
{{- define "link-env" -}}
- name: TOKENMILL_WORKER_SECRET
  valueFrom: {secretKeyRef: {name: {{ required "links.secretName is needed" .Values.links.secretName }}, key: secret}}
{{- end }}

{{- define "link-args" -}}
{{- if .Values.links.insecure }}
- --worker-insecure
{{- else if .Values.links.tlsSecretName }}
- --worker-tls-cert=/links/tls.crt
- --worker-tls-key=/links/tls.key
- --worker-tls-ca=/links/ca.crt
{{- else }}
{{- fail "links.tlsSecretName is needed, or links.insecure" }}
{{- end }}
{{- end }}

{{/* What tokenmill is asked to serve: what was pulled, or what lies on the volume. */}}
{{- define "model" -}}
{{ default .Values.model.path .Values.model.pull.name }}
{{- end }}

{{/* Of all pods, before their containers. */}}
{{- define "pod" -}}
serviceAccountName: {{ include "service-account" . }}
automountServiceAccountToken: false
{{- if .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml .Values.imagePullSecrets | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
{{- if .Values.model.pull.name }}
initContainers:
  - name: pull
    image: {{ include "image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command:
      {{- toYaml .Values.command | nindent 6 }}
    args: [pull, {{ .Values.model.pull.name | quote }}]
    env:
      - {name: TOKENMILL_CACHE, value: /cache}
      - {name: HOME, value: /tmp}
      {{- if .Values.model.pull.env }}
      {{- toYaml .Values.model.pull.env | nindent 6 }}
      {{- end }}
    securityContext:
      {{- toYaml .Values.containerSecurityContext | nindent 6 }}
    {{- if .Values.model.pull.resources }}
    resources:
      {{- toYaml .Values.model.pull.resources | nindent 6 }}
    {{- end }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{- define "service-account" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "name" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Pods of one kind lie apart. Of (dict "values" .Values "labels" TEXT). */}}
{{- define "spread" -}}
{{- if .values.topologySpread.enabled }}
topologySpreadConstraints:
  - maxSkew: {{ .values.topologySpread.maxSkew }}
    topologyKey: {{ .values.topologySpread.topologyKey }}
    whenUnsatisfiable: {{ .values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- .labels | nindent 8 }}
{{- end }}
{{- end }}

{{- define "mounts" -}}
{{- if not .Values.model.pull.name }}
- {name: model, mountPath: {{ .Values.model.mountPath }}, readOnly: true}
{{- end }}
- {name: cache, mountPath: /cache}
- {name: tmp, mountPath: /tmp}
{{- if not .Values.links.insecure }}
- {name: links, mountPath: /links, readOnly: true}
{{- end }}
{{- end }}

{{- define "volumes" -}}
{{- if not .Values.model.pull.name }}
- name: model
  {{- toYaml .Values.model.volume | nindent 2 }}
{{- end }}
- name: cache
  {{- toYaml .Values.cache | nindent 2 }}
- name: tmp
  emptyDir: {}
{{- if not .Values.links.insecure }}
- name: links
  secret: {secretName: {{ .Values.links.tlsSecretName }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* The flags that decide what is computed: equal in all workers. */}}
{{- define "model-args" -}}
- --max-model-len={{ .Values.model.maxModelLen }}
- --kv-cache-dtype={{ .Values.model.kvCacheDtype }}
{{- end }}
