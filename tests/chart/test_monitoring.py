"""Monitoring is a release of its own; a run's release has its own PodMonitor and nothing else of it."""

import json

import yaml

from tests import generate_chart as chart
from wandistill.kube import fields, values
from wandistill.kube.job import render

CONTROL = {"image": {"control": {"repository": "registry.example.com/control"}}}
RUN = fields.merge(chart.SAMPLE, values.load(chart.PRESETS / "cpu-demo.yaml"))
MONITORING = fields.merge(CONTROL, values.load(chart.PRESETS / "monitoring.yaml"))


def objects(helm, *layers):
    done = helm.template(list(layers), "my-release")
    assert done.returncode == 0, done.stderr
    return [made for made in yaml.safe_load_all(done.stdout) if made]


def kinds(made):
    return sorted(one["kind"] for one in made)


def one(made, kind):
    (found,) = [one for one in made if one["kind"] == kind]
    return found


def test_the_monitoring_release_has_exporter_dashboards_and_alerts_and_no_job(helm):
    made = objects(helm, MONITORING)
    expected = ["ServiceAccount", "Role", "RoleBinding", "Role", "RoleBinding", "Deployment", "PodMonitor"]
    assert kinds(made) == sorted([*expected, "PrometheusRule", "NetworkPolicy", *["ConfigMap"] * 3])
    rule = yaml.safe_load((chart.CHART / "rules/alerts.yaml").read_text())
    assert one(made, "PrometheusRule")["spec"] == rule
    for config in (found for found in made if found["kind"] == "ConfigMap"):
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config["metadata"]["annotations"]["grafana_folder"] == "wandistill"
        ((name, text),) = config["data"].items()
        assert json.loads(text) == json.loads((chart.CHART / "dashboards" / name).read_text())


def test_the_exporter_s_series_keep_their_labels_and_its_pods_are_what_its_monitor_selects(helm):
    made = objects(helm, MONITORING, {"metrics": {"podMonitor": {"additionalLabels": {"release": "prometheus"}}}})
    monitor, template = one(made, "PodMonitor"), one(made, "Deployment")["spec"]["template"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    (container,) = template["spec"]["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_exporter_may_watch_pods_and_write_its_own_state_and_no_more(helm):
    def rights(made):
        return {
            (resource, verb, name)
            for role in made
            if role["kind"] in ("Role", "ClusterRole")
            for rule in role["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
            for name in rule.get("resourceNames", [""])
        }

    own = objects(helm, MONITORING)
    expected = {("pods", verb, "") for verb in ("get", "list", "watch")} | {("events", "create", "")}
    for resource, name in (("configmaps", "wandistill-exporter-state"), ("leases", "wandistill-exporter")):
        expected |= {(resource, "create", ""), (resource, "get", name), (resource, "update", name)}
    assert rights(own) == expected and "ClusterRole" not in kinds(own)

    wide = objects(helm, MONITORING, {"exporter": {"clusterWide": True}})
    assert rights(wide) == expected
    assert one(wide, "ClusterRole")["rules"][0]["resources"] == ["pods"]
    # What it remembers stays in its namespace.
    assert one(wide, "Role")["rules"][0]["resources"] == ["configmaps"]
    (container,) = one(wide, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--cluster_wide" in container["args"]


def test_a_run_s_release_has_a_monitor_of_its_pods_where_it_is_asked_for_and_nothing_else(helm):
    plain = objects(helm, RUN)
    assert not {"PodMonitor", "PrometheusRule", "Deployment"} & set(kinds(plain))
    # Helm's test has an account, which is gone after it.
    assert "helm.sh/hook" in one(plain, "ServiceAccount")["metadata"]["annotations"]
    made = objects(helm, RUN, {"metrics": {"podMonitor": {"enabled": True}}})
    assert set(kinds(made)) - set(kinds(plain)) == {"PodMonitor"}
    monitor = one(made, "PodMonitor")
    template = one(made, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = template["spec"]["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]] and "honorLabels" not in endpoint


def test_pods_tell_their_run_and_pool_and_annotations_take_the_operator_s_place(helm):
    layers = [RUN, {"metrics": {"annotations": True, "port": 9555}}]
    job = one(objects(helm, *layers), "PyTorchJob")
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        metadata, spec = replica["template"]["metadata"], replica["template"]["spec"]
        assert metadata["labels"]["wandistill.dev/pool"] == "main"
        assert metadata["annotations"]["prometheus.io/scrape"] == "true"
        assert metadata["annotations"]["prometheus.io/port"] == "9555"
        environment = {entry["name"]: entry.get("value") for entry in spec["containers"][0]["env"]}
        assert environment["WANDISTILL_RUN"] == job["metadata"]["name"]
        assert environment["WANDISTILL_POOL"] == "main" and environment["WANDISTILL_METRICS_PORT"] == "9555"
    (same,) = [made for made in render(values.resolve(*layers), "my-release") if made["kind"] == "PyTorchJob"]
    assert same["spec"] == job["spec"]


def test_the_exporter_s_image_is_asked_for(helm):
    done = helm.template([values.load(chart.PRESETS / "monitoring.yaml")], "my-release")
    assert done.returncode != 0 and "image.control.repository is empty: build and push the image with" in done.stderr


def test_without_pools_and_without_the_exporter_there_is_nothing_to_install(helm):
    done = helm.template([chart.SAMPLE, {"output": {"existingClaim": "runs"}}], "my-release")
    assert done.returncode != 0 and "pools is empty" in done.stderr
