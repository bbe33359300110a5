{{/*
What only a cluster can tell. Takes dict "root" and "names", those of the release's jobs. Without one (helm template, GitOps tools that render offline) lookups are empty and
nothing is checked: the namespace's default ServiceAccount is always there where they answer.
*/}}
{{- define "wandistill.cluster" -}}
{{- if lookup "v1" "ServiceAccount" .root.Release.Namespace "default" -}}
{{- if not (.root.Capabilities.APIVersions.Has "kubeflow.org/v1/PyTorchJob") -}}
{{- fail "this cluster has no PyTorchJob: install the Kubeflow training operator first: kubectl apply --server-side -k 'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4'." -}}
{{- end -}}
{{- if and .root.Release.IsUpgrade (ne .root.Values.job.onChange "replace") -}}
{{- $root := .root -}}
{{- $names := .names -}}
{{- range (lookup "kubeflow.org/v1" "PyTorchJob" .root.Release.Namespace "").items -}}
{{- $labels := default dict .metadata.labels -}}
{{- if and (eq (default "" (index $labels "app.kubernetes.io/instance")) $root.Release.Name) (eq (default "" (index $labels "app.kubernetes.io/managed-by")) $root.Release.Service) (not (has .metadata.name $names)) -}}
{{- $over := false -}}
{{- range (default dict .status).conditions -}}
{{- if and (has .type (list "Succeeded" "Failed")) (eq .status "True") }}{{ $over = true }}{{ end -}}
{{- end -}}
{{- if and (not $over) (eq $root.Values.job.onChange "refuse") -}}
{{- fail (printf "job %s of this release is still running, and the new values make another job: wait for its end, delete it, or set job.onChange to keep (both run) or replace (the old one is deleted; a run of the new job begins anew)." .metadata.name) -}}
{{- else if and (not $over) (ne (default "" (index (default dict .metadata.annotations) "helm.sh/resource-policy")) "keep") -}}
{{- /* Helm looks at the object that is there, and this one came without the annotation. */ -}}
{{- fail (printf "job %s of this release is still running and was installed without job.onChange=keep, so Helm would delete it: run 'kubectl annotate --namespace %s pytorchjob/%s configmap/%s helm.sh/resource-policy=keep' and upgrade again." .metadata.name $root.Release.Namespace .metadata.name .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
