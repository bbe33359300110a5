module wandistill.test/prometheus-operator

go 1.26.0

require github.com/prometheus-operator/prometheus-operator v0.85.0

replace (
	github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring => github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring v0.85.0
	github.com/prometheus-operator/prometheus-operator/pkg/client => github.com/prometheus-operator/prometheus-operator/pkg/client v0.85.0
)
