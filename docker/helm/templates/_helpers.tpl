{{- define "gpuscore.labels" -}}
app.kubernetes.io/name: gpuscore
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "gpuscore.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.device) }}
{{- end }}
{{- define "gpuscore.config" -}}
{{- range $name, $value := .Values.settings }}
{{ $name }} = {{ $value | toJson }}
{{- end }}
{{- end }}
