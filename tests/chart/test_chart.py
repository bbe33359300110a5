"""The chart gives the objects of `wandistill render`, refuses what cannot be, and looks up what the planner says."""

import base64
import gzip
import json
import random
import resource
import shlex

import pytest
import yaml

from tests import generate_chart as chart
from wandistill.errors import ConfigError
from wandistill.kube import fields, tables, values
from wandistill.kube.helm import upgrade_here
from wandistill.kube.job import render
from wandistill.kube.values_command import computed

PRESETS = chart.JOB_PRESETS
IMAGE = chart.SAMPLE
CLAIM = {"output": {"existingClaim": "runs"}}
CPU = fields.merge(fields.merge(IMAGE, CLAIM), {"pools": {"main": {"processesPerNode": 2}}})
GPU = fields.merge(
    fields.merge(IMAGE, CLAIM),
    {
        "teacher": {"model": "wan2.2-t2v-a14b", "cache": {"existingClaim": "models"}},
        "student": {"config": "1b"},
        "data": {"prompts": ["a cat"]},
        "training": {"optimizer": "adamw8bit", "mixed_precision": "bf16", "batch_size": 1},
        "pools": {"main": {"gpusPerNode": 4, "gpu": "rtx-3090"}},
    },
)
HELMS_LABELS = ("app.kubernetes.io/managed-by", "app.kubernetes.io/version", "helm.sh/chart")


def objects(text):
    """Objects by kind and name, without Helm's own labels and test hooks."""
    found = {}
    for made in yaml.safe_load_all(text):
        if made is None or "helm.sh/hook" in (made["metadata"].get("annotations") or {}):
            continue
        for label in HELMS_LABELS:
            made["metadata"]["labels"].pop(label, None)
        found[made["kind"], made["metadata"]["name"]] = made
    return found


def rendered(resolved, release="my-run"):
    return {(made["kind"], made["metadata"]["name"]): made for made in render(resolved, release)}


def templated(helm, *layers, release="my-run"):
    done = helm.template(list(layers), release)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def processor_seconds():
    """Of the programs that ended so far, whatever runs beside them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def preset_layers(preset):
    own = values.load(preset)
    return [own, IMAGE, {} if own["teacher"]["model"] == "embedded" else chart.PROMPTS]


def test_lint_is_strict_and_clean(helm):
    done = helm.run(
        "lint",
        "--strict",
        "helm/wandistill",
        "-f",
        "helm/wandistill/presets/cpu-demo.yaml",
        "--set",
        "image.train.repository=registry.example.com/wandistill",
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_chart_client_and_manifest_give_the_same_objects_in_less_than_a_second(helm, preset):
    release = chart.release(preset.stem)
    layers = preset_layers(preset)
    began = processor_seconds()
    found = templated(helm, *layers, release=release)
    assert processor_seconds() - began < 1
    assert found == rendered(values.resolve(*layers), release)
    assert found == objects((chart.ROOT / "k8s" / preset.name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", chart.VARIANTS)
def test_a_variant_s_manifest_is_what_the_chart_makes_of_its_change(helm, name):
    preset, change = chart.VARIANTS[name]
    found = templated(helm, *preset_layers(preset), change, release=chart.release(name))
    assert found == objects((chart.ROOT / f"k8s/{name}.yaml").read_text(encoding="utf-8"))


EVERYTHING = {
    "global": {"imageRegistry": "mirror.example.com:5000"},
    "teacher": {
        "tokenSecret": {"name": "hub"},
        "endpoint": "https://hub.example.com",
        "proxy": {"http": "http://p:1", "https": "http://p:2", "noProxy": ".svc"},
        "caBundle": {"configMap": "ca"},
        "offline": True,
    },
    "data": {"prompts": ["a <cat> & a dog", "ein Bär"]},
    "training": {"lr": 1e-5, "seed": 4294967295, "max_steps": 1000000, "deterministic": True, "negative_prompt": "no"},
    "image": {"train": {"digest": f"sha256:{'a' * 64}", "pullPolicy": "Always", "pullSecrets": ["one", "two"]}},
    "job": {
        "deadlineSeconds": 1000000,
        "ttlSecondsAfterFinished": 0,
        "suspend": True,
        "queue": "q",
        "onChange": "keep",
    },
    "extraEnv": [{"name": "A", "value": "1"}],
    "extraEnvFrom": [{"secretRef": {"name": "s"}}],
    "extraVolumes": [{"name": "v", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
    "extraResources": {"rdma/hca": 1},
    "podLabels": {"team": "a"},
    "podAnnotations": {"sidecar.istio.io/inject": "true", "b": "c"},
    "serviceAccount": {"name": "sa"},
    "networkPolicy": {"enabled": False},
}
POOL = {
    "cpus": 3,
    "threads": 5,
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "k", "operator": "Exists"}],
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "resources": {"limits": {"memory": "500Gi"}},
}
LAYERS = {
    "everything": [CPU, EVERYTHING, {"pools": {"main": POOL}}],
    "everything on GPUs": [GPU, EVERYTHING, {"pools": {"main": POOL}}],
    "affinity of one's own": [CPU, {"pools": {"main": {"affinity": {"podAntiAffinity": {}}}}}],
    "prepared": [GPU, {"prepare": {"enabled": True}, "job": {"onChange": "keep"}}],
    "prepared with everything": [
        GPU,
        EVERYTHING,
        {
            "prepare": {
                "enabled": True,
                "waitSeconds": 600,
                "cpus": "500m",
                "nodeSelector": {"pool": "cpu"},
                "tolerations": [{"operator": "Exists"}],
                "affinity": {"podAntiAffinity": {}},
                "resources": {"limits": {"memory": "64Gi", "cpu": 16}},
            }
        },
    ],
    "prepared without GPU": [CPU, {"prepare": {"enabled": True}, "topology": "independent", "pools": {"b": {}}}],
    "sized for every fallback": [GPU, {"training": {"on_oom": "replan"}}],
    "a fallback of a resident teacher": [
        GPU,
        {"training": {"on-oom": "replan"}, "pools": {"main": {"gpu": "h200-141gb", "placement": "gpu"}}},
    ],
    "no fallbacks without GPU": [CPU, {"training": {"on_oom": "replan"}}],
    "weights in a folder": [GPU, {"teacher": {"path": "wan/a14b"}}],
    "a revision": [GPU, {"teacher": {"revision": "1234abcd"}, "job": {"restarts": 0}}],
    "a hub id": [GPU, {"teacher": {"model": "Wan-AI/Wan2.2-T2V-A14B-Diffusers"}}],
    "prompts from a ConfigMap": [GPU, {"data": {"prompts": None, "configMap": {"name": "p"}}}],
    "prompts on a claim": [GPU, {"data": {"prompts": None, "existingClaim": "p", "path": "a.csv"}}],
    "flags with hyphens": [CPU, {"training": {"max-steps": 5}}],
    "independent pools": [
        GPU,
        {"topology": "independent", "pools": {"big": {"gpusPerNode": 1, "gpu": "h200-141gb"}}},
    ],
    "gpu0 whose teacher's rank trains": [GPU, {"pools": {"main": {"gpu": "b200-180gb", "placement": "gpu0"}}}],
    "gpu0 whose teacher's rank only serves": [
        GPU,
        {"pools": {"main": {"gpu": "a100-80gb", "placement": "gpu0"}}, "training": {"batch_size": 4}},
    ],
    "one GPU on each of three nodes": [GPU, {"pools": {"main": {"nodes": 3, "gpusPerNode": 1, "gpu": "l40s"}}}],
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_every_value_reaches_the_same_place_in_chart_and_client(helm, layers):
    assert templated(helm, *layers) == rendered(values.resolve(*layers))


def test_numbers_arrive_as_written(helm):
    training = {"max_steps": 1000000, "seed": 4294967295, "lr": 1e-5, "deterministic": True, "warmup_steps": None}
    found = templated(helm, CPU, {"training": training})
    text = next(made for (kind, _), made in found.items() if kind == "ConfigMap")["data"]["train.yaml"]
    for line in ("max_steps: 1000000", "seed: 4294967295", "lr: 0.00001", "deterministic: true"):
        assert line in text.splitlines()
    assert "warmup_steps" not in text


REFUSED = [
    (CPU, {"traning": {}}, "additional properties 'traning' not allowed"),
    (CPU, {"teacher": {"modle": "x"}}, "additional properties 'modle' not allowed"),
    (CPU, {"pools": {"main": {"gpuPerNode": 1}}}, "additional properties 'gpuPerNode' not allowed"),
    (CPU, {"pools": {"main": {"nodes": 0}}}, "minimum: got 0, want 1"),
    (CPU, {"pools": {"main": {"nodes": "two"}}}, "got string, want integer"),
    (CPU, {"pools": {"main": {"placement": "tpu"}}}, "value must be one of 'cpu', 'gpu'"),
    (CPU, {"topology": "both"}, "value must be one of 'single', 'independent'"),
    (CPU, {"training": {"optimizer": "sgd"}}, "value must be one of 'adamw'"),
    (CPU, {"training": {"lr": "fast"}}, "got string, want null or number"),
    (CPU, {"image": {"train": {"digest": "abc"}}}, "does not match pattern"),
    (CPU, {"image": {"train": {"repository": None}}}, "registry.example.com/wandistill:0.1.0', then"),
    (CPU, {"output": {"existingClaim": ""}}, "output: there is no claim for runs"),
    (CPU, {"output": {"create": {"enabled": True}}}, "output: existingClaim and create are both set"),
    (
        CPU,
        {"output": {"existingClaim": "", "create": {"enabled": True}}, "pools": {"main": {"nodes": 2}}},
        "output.create.accessModes is ReadWriteOnce, but more than one pod mounts the claim",
    ),
    (CPU, {"pools": {"main": None}}, "pools is empty: take a preset"),
    (CPU, {"pools": {"other": {}}}, "topology single takes one pool, but pools has main, other"),
    (CPU, {"topology": "teacher-and-students"}, "takes the pools teacher and students, but pools has main"),
    (CPU, {"pools": {"main": {"gpusPerNode": 2}}}, "pools.main.gpu is empty, but gpusPerNode is 2: name the GPU"),
    (CPU, {"pools": {"main": {"gpu": "l4"}}}, "pools.main.gpu is l4, but gpusPerNode is 0"),
    (GPU, {"pools": {"main": {"gpuResource": "nvidia.com/mig-1g.10gb"}}}, "a process sees one MIG device"),
    (
        GPU,
        {"pools": {"main": {"gpu": "voodoo"}}},
        "pools.main.gpu voodoo: is not in the catalogue; known are a100-40gb",
    ),
    (CPU, {"training": {"teacher_dtype": "int8"}}, "training.teacher_dtype: belongs to pools.<name>.dtype"),
    (CPU, {"training": {"teacher-on-cpu": True}}, "training.teacher-on-cpu: belongs to pools.<name>.placement"),
    (CPU, {"training": {"batchsize": 1}}, "training.batchsize: 'batchsize' is not a setting"),
    (CPU, {"teacher": {"model": "wan9"}}, "teacher.model wan9: is not in the catalogue; known are wan2.1-t2v-1.3b"),
    (CPU, {"teacher": {"path": "a"}}, "teacher.path is set, but teacher.model is embedded"),
    (
        CPU,
        {"prepare": {"enabled": True}, "output": {"existingClaim": "", "create": {"enabled": True}}},
        "output.create.accessModes is ReadWriteOnce, but more than one pod mounts the claim",
    ),
    (
        GPU,
        {
            "topology": "teacher-and-students",
            "training": {"on_oom": "replan"},
            "pools": {
                "main": None,
                "teacher": {"gpusPerNode": 1, "gpu": "l4"},
                "students": {"gpusPerNode": 1, "gpu": "l4"},
            },
        },
        "on_oom is replan, but topology teacher-and-students has one placement",
    ),
    (CPU, {"prepare": {"enabled": True}, "training": {"embeddings": "online"}}, "there is nothing to prepare"),
    (CPU, {"teacher": {"revision": "v1"}}, "teacher.revision is set, but teacher.model is embedded"),
    (GPU, {"teacher": {"revision": "v1", "path": "a"}}, "teacher.revision is set, but teacher.path is set"),
    (GPU, {"training": {"teacher_revision": "v1"}}, "training.teacher_revision: belongs to teacher.revision"),
    (GPU, {"teacher": {"cache": {"existingClaim": ""}}}, "its weights need a claim"),
    (GPU, {"data": {"prompts": []}}, "data is empty, but teacher.model is wan2.2-t2v-a14b"),
    (GPU, {"data": {"existingClaim": "x"}}, "data has prompts and existingClaim: take one of them"),
    (CPU, {"pools": {"main": None, "a" * 40: {}}}, "characters, but pods' names leave 50"),
    (
        GPU,
        {"pools": {"main": {"placement": "gpu"}}},
        "placement gpu does not fit: 63.9 GiB needed on a GPU, rtx-3090 has",
    ),
    (
        GPU,
        {"training": {"batch_size": 8}, "student": {"config": "half"}},
        "pools.main: no placement fits: wan2.2-t2v-a14b",
    ),
    (
        GPU,
        {"training": {"batch_size": 3}},
        "training.batch_size 3 is outside the chart's tables: run 'wandistill values",
    ),
    (GPU, {"training": {"ema_decay": 0.99}}, "training.ema_decay 0.99 is outside the chart's tables"),
    (GPU, {"pools": {"main": {"gpuMemory": "40Gi"}}}, "gpuMemory 40Gi is outside the chart's tables"),
    (GPU, {"computed": {"main": {"inputs": "0", "memory": "1Gi"}}}, "computed.main was made for other values"),
]


@pytest.mark.parametrize(("base", "change", "sentence"), REFUSED, ids=[row[2][:45] for row in REFUSED])
def test_bad_values_die_in_helm_template_with_a_sentence(helm, base, change, sentence):
    done = helm.template([base, change])
    assert done.returncode != 0
    assert sentence in done.stderr


def test_a_release_with_a_bad_name_is_refused(helm):
    assert "is not lower-case letters" in helm.template([CPU], "4x24gb").stderr


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"batch_size": 3}},
        {"training": {"gradient_accumulation_steps": 4, "ema_decay": 0.999, "ema_device": "cpu"}},
        {"pools": {"main": {"gpuMemory": "60Gi", "placement": "sharded"}}},
        {"pools": {"main": {"gpusPerNode": 3}}},
    ],
    ids=["batch", "accumulation and average", "memory", "three GPUs"],
)
def test_values_compute_what_the_tables_do_not_have(helm, change):
    numbers = {"computed": computed(values.resolve(GPU, change))}
    assert templated(helm, GPU, change, numbers) == rendered(values.resolve(GPU, change, numbers))


ROWS = 200


def random_rows():
    """Rows of all tables, drawn alike each time."""
    draw = random.Random(7)
    for _ in range(ROWS):
        teacher = draw.choice(["wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.2-t2v-a14b", "wan2.2-ti2v-5b", "embedded"])
        embedded = teacher == "embedded"
        extent = tables.extent(teacher)
        optimizer, mixed = draw.choice(extent.profiles)
        yield {
            "teacher": {"model": teacher},
            "student": {"config": draw.choice(extent.students)},
            "training": {
                "optimizer": optimizer,
                "mixed_precision": mixed,
                "resolution": draw.choice(extent.resolutions),
                "batch_size": draw.choice(extent.batches),
                "gradient_checkpointing": draw.choice([True, False]),
            },
            "pools": {
                "main": {
                    "nodes": draw.choice([1, 1, 2]),
                    "placement": draw.choice(["auto", "auto", *(each.value for each in tables.PLACEMENTS)]),
                    "dtype": draw.choice(list(tables.DTYPES)),
                    **(
                        {"processesPerNode": draw.choice([1, 2, 4, 8])}
                        if embedded and draw.random() < 0.5
                        else {
                            "gpusPerNode": draw.choice([1, 2, 4, 8]),
                            "gpu": draw.choice(sorted(chart.catalog()["usable"])),
                        }
                    ),
                }
            },
        }


@pytest.mark.timeout(1800)  # 200 starts of helm
def test_two_hundred_random_rows_of_the_tables_are_what_the_planner_says(helm):
    agreed = {"fit": 0, "refused": 0, "outside": 0}
    for row in random_rows():
        layers = [{**GPU, "pools": {}, "training": {}}, row]
        done = helm.template(layers)
        if "is outside the chart's tables" in done.stderr:
            assert row["pools"]["main"]["placement"] == "gpu0" and row["pools"]["main"]["nodes"] == 2
            agreed["outside"] += 1
            continue
        try:
            expected = rendered(values.resolve(*layers))
        except ConfigError as error:
            assert done.returncode != 0, f"{row}: {error}"
            assert "fit" in done.stderr or "with one rank it is gpu" in done.stderr, done.stderr
            agreed["refused"] += 1
            continue
        assert done.returncode == 0, f"{row}: {done.stderr}"
        assert objects(done.stdout) == expected, row
        agreed["fit"] += 1
    assert agreed["fit"] > 60 and agreed["refused"] > 30


def test_a_preset_takes_another_placement_with_other_sizes(helm):
    preset = chart.PRESETS / "4x24gb.yaml"
    before = templated(helm, *preset_layers(preset))
    after = templated(helm, *preset_layers(preset), {"pools": {"main": {"placement": "disk"}}})

    def memory(found):
        return next(made for (kind, _), made in found.items() if kind == "PyTorchJob")["metadata"]["annotations"]

    assert memory(before)["wandistill.dev/placement"] == "stream"
    assert memory(after)["wandistill.dev/placement"] == "disk"
    assert memory(after)["wandistill.dev/memory"] != memory(before)["wandistill.dev/memory"]


def test_what_helm_test_makes_asks_about_the_claims_of_the_release_and_writes_on_those_of_its_runs(helm):
    def hooks(*layers):
        made = yaml.safe_load_all(helm.template([CPU, *layers]).stdout)
        found = [one for one in made if one and "helm.sh/hook" in (one["metadata"].get("annotations") or {})]
        return {one["metadata"]["name"] if one["kind"] == "Pod" else one["kind"]: one for one in found}

    def arguments(made):
        return [made[f"my-run-test-{what}"]["spec"]["containers"][0]["args"] for what in ("claims", "folders")]

    assert arguments(hooks()) == [["runs=1"], ["/output"]]
    two = {"pools": {"main": {"nodes": 2}}}
    shared = hooks(two, {"teacher": {"cache": {"existingClaim": "models"}}, "data": {"existingClaim": "prompts"}})
    assert arguments(shared) == [["runs=2", "models=2", "prompts=1"], ["/output", "/cache"]]
    claims, events = shared["Role"]["rules"]
    assert (claims["resourceNames"], claims["verbs"]) == (["runs", "models", "prompts"], ["get"])
    assert (events["resources"], events["verbs"]) == (["events"], ["list"])
    for made, account in ((shared, "my-run-test"), (hooks(two, {"serviceAccount": {"name": "runner"}}), "runner")):
        assert made["my-run-test-claims"]["spec"]["serviceAccountName"] == account
        assert made["RoleBinding"]["subjects"][0]["name"] == account
        assert made.get("ServiceAccount", {"metadata": {"name": "runner"}})["metadata"]["name"] == account


def test_advice_as_a_helm_command_makes_the_change(helm, monkeypatch):
    monkeypatch.setenv("WANDISTILL_RELEASE", "my-run")
    monkeypatch.setenv("WANDISTILL_RUN", "my-run-main-0123abcd")
    monkeypatch.setenv("WANDISTILL_POOL", "main")
    changes = {"teacher_device_strategy": "disk", "gradient_checkpointing": True, "batch_size": 2}
    words = shlex.split(upgrade_here(changes))
    assert words[:5] == ["helm", "upgrade", "my-run", "helm/wandistill", "--reuse-values"]
    done = helm.template([GPU], "my-run", *words[5:])
    assert done.returncode == 0, done.stderr
    config = next(made for (kind, _), made in objects(done.stdout).items() if kind == "ConfigMap")
    lines = config["data"]["train.yaml"].splitlines()
    for line in ('teacher_device_strategy: "disk"', "gradient_checkpointing: true", "batch_size: 2"):
        assert line in lines


def test_generated_files_are_those_of_the_code():
    assert chart.stale(chart.generated()) == []


@pytest.mark.parametrize("name", [name for name in tables.table_names() if not name.endswith("none")])
def test_no_placement_takes_more_of_the_host_than_the_fallbacks(name):
    """gpu0 is not among those that the fallbacks' size is made of."""
    table = json.loads((chart.TABLES / f"{name}.json").read_text(encoding="utf-8"))

    def sizes(row):
        return [tuple(map(int, table["sizes"][int(cell.split(",")[2])].split())) for cell in row.split()]

    for key, row in table["rows"].items():
        before, placement = key.rsplit("/", 1)
        if placement != "gpu0" or "+" in before:
            continue
        for (memory, shm), (most, most_shm) in zip(sizes(row), sizes(table["rows"][f"{before}/replan"]), strict=True):
            assert memory <= most and shm <= most_shm, key


def test_a_release_stays_within_its_secret():
    """Helm keeps a release as JSON with its files in base64, compressed, in base64."""
    files = {
        str(path): base64.b64encode(path.read_bytes()).decode() for path in chart.CHART.rglob("*") if path.is_file()
    }
    manifest = (chart.ROOT / "k8s/2-node.yaml").read_text(encoding="utf-8")
    release = json.dumps({"chart": files, "manifest": manifest}).encode()
    assert len(base64.b64encode(gzip.compress(release))) < 600_000
