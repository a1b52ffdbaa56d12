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

{{- define "mounts" -}}
- {name: model, mountPath: {{ .Values.model.mountPath }}, readOnly: true}
- {name: cache, mountPath: /cache}
{{- if not .Values.links.insecure }}
- {name: links, mountPath: /links, readOnly: true}
{{- end }}
{{- end }}

{{- define "volumes" -}}
- name: model
{{ toYaml .Values.model.volume | indent 2 }}
- name: cache
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
