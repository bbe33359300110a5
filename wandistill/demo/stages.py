"""The stages that make the embedded teacher, each saved when it is finished and never made twice."""

import json
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

from wandistill.demo.evaluation import evaluate_teacher
from wandistill.demo.judge import Judge, load_judge, save_judge
from wandistill.demo.judge_training import train_judge
from wandistill.demo.model_card import model_card
from wandistill.demo.packing import pack, weight_bytes
from wandistill.demo.recipe import TINY, Recipe
from wandistill.demo.training import Log, tf32
from wandistill.demo.transformer_training import (
    Latents,
    TimeRange,
    compile_blocks,
    embed_prompts,
    encode_latents,
    token_table,
    train_velocity,
)
from wandistill.demo.vae_training import train_vae

Made = tuple[dict[str, Tensor], dict[str, Any]]
"""A stage's tensors and its record (steps, seconds, ...)."""


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def software() -> str:
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, diffusers {diffusers.__version__}, "
        f"transformers {transformers.__version__}"
    )


@dataclass(frozen=True)
class TeacherRun:
    """One making of the teacher: its recipe, and the folder that holds the finished stages."""

    recipe: Recipe
    seed: int
    device: torch.device
    work: Path
    log: Log

    def open(self) -> None:
        """Creates the work folder. ValueError when it holds stages of another recipe or seed."""
        self.work.mkdir(parents=True, exist_ok=True)
        described = json.dumps({"recipe": asdict(self.recipe), "seed": self.seed}, indent=2)
        file = self.work / "recipe.json"
        if file.exists() and file.read_text() != described:
            raise ValueError(
                f"{self.work} holds stages of another recipe or seed: empty it or choose another --work_dir."
            )
        file.write_text(described)

    def record(self, stage: str) -> dict[str, Any]:
        return json.loads((self.work / f"{stage}.json").read_text())

    def stage(self, name: str, make: Callable[[], Made]) -> dict[str, Tensor]:
        """The stage's tensors on the run's device: those in the work folder, or else made and saved there."""
        tensors_file, record_file = self.work / f"{name}.safetensors", self.work / f"{name}.json"
        if record_file.exists():
            self.log(f"{name}: done before, taken from {tensors_file}")
            return load_file(tensors_file, device=str(self.device))
        self.log(f"{name}: starts")
        started = time.perf_counter()
        with tf32(True):
            tensors, record = make()
        tensors = {key: value.detach().contiguous() for key, value in tensors.items()}
        save_file(tensors, tensors_file)
        record |= {
            "stage_seconds": round(time.perf_counter() - started, 1),
            "hardware": hardware(self.device),
            "software": software(),
        }
        # Last, and whole at once: a stage is finished when its record is there.
        unfinished = record_file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(record, indent=2))
        unfinished.replace(record_file)
        self.log(f"{name}: done in {record['stage_seconds']:.0f} s")
        return tensors

    # ---- the parts, from the stages' results

    def judge(self) -> Judge:
        def make() -> Made:
            judge, record = train_judge(self.recipe.judge, self.device, self.seed + 1, self.log)
            return judge.state_dict(), record

        judge = Judge().to(self.device)
        judge.load_state_dict(self.stage("judge", make))
        return judge.eval().requires_grad_(False)

    def vae(self) -> AutoencoderKLWan:
        config = self.recipe.vae_config()

        def make() -> Made:
            vae, record = train_vae(config, self.recipe.vae, self.device, self.seed + 2, self.log)
            return vae.state_dict(), record

        weights = self.stage("vae", make)
        statistics = {key: self.record("vae")[key] for key in ("latents_mean", "latents_std")}
        vae = AutoencoderKLWan(**config, **statistics).to(self.device)
        vae.load_state_dict(weights)
        return vae.eval().requires_grad_(False)

    def latents(self, vae: AutoencoderKLWan) -> Latents:
        def make() -> Made:
            latents = encode_latents(vae, self.recipe.latents, self.device, self.seed + 3)
            return vars(latents), {"frames": len(latents.frames), "clips": len(latents.clips)}

        return Latents(**self.stage("latents", make))

    def new_text_encoder(self) -> UMT5EncoderModel:
        return UMT5EncoderModel(UMT5Config(**self.recipe.text_encoder_config())).to(self.device)

    def new_transformer(self) -> WanTransformer3DModel:
        return WanTransformer3DModel(**self.recipe.transformer_config()).to(self.device)

    def transformer(self, latents: Latents) -> tuple[WanTransformer3DModel, UMT5EncoderModel]:
        """The transformer for all noise levels and the text encoder, trained together."""

        def make() -> Made:
            torch.manual_seed(self.seed + 4)
            both = nn.ModuleDict({"transformer": self.new_transformer(), "text_encoder": self.new_text_encoder()})
            compile_blocks(both["transformer"])
            tokens = token_table(self.device)
            record = train_velocity(
                "transformer",
                both["transformer"],
                lambda numbers: embed_prompts(both["text_encoder"], tokens[numbers]),
                list(both.parameters()),
                latents,
                self.recipe.transformer,
                TimeRange(0.0, 1.0, self.recipe.flow_shift),
                torch.Generator(self.device).manual_seed(self.seed + 4),
                self.log,
            )
            return {key: value.clone() for key, value in both.state_dict().items()}, record

        weights = self.stage("transformer", make)
        both = nn.ModuleDict({"transformer": self.new_transformer(), "text_encoder": self.new_text_encoder()})
        both.load_state_dict(weights)
        both.eval().requires_grad_(False)
        return both["transformer"], both["text_encoder"]

    def expert(
        self,
        name: str,
        low: float,
        high: float,
        base: WanTransformer3DModel,
        text_encoder: UMT5EncoderModel,
        latents: Latents,
    ) -> WanTransformer3DModel:
        """A transformer that goes on from `base` on times [low, high], with the frozen text encoder."""

        def make() -> Made:
            tokens = token_table(self.device)
            expert = self.new_transformer()
            expert.load_state_dict(base.state_dict())
            compile_blocks(expert)
            record = train_velocity(
                name,
                expert,
                lambda numbers: embed_prompts(text_encoder, tokens[numbers]),
                list(expert.parameters()),
                latents,
                self.recipe.experts,
                TimeRange(low, high, self.recipe.flow_shift),
                torch.Generator(self.device).manual_seed(self.seed + 5),
                self.log,
            )
            return expert.state_dict(), record

        expert = self.new_transformer()
        expert.load_state_dict(self.stage(name, make))
        return expert.eval().requires_grad_(False)


def make_teacher(run: TeacherRun) -> tuple[Path, dict[str, Any]]:
    """All stages; the packed result in the work folder (teacher/ and judge.safetensors), and the record of the run."""
    run.open()
    recipe = run.recipe
    judge, vae = run.judge(), run.vae()
    latents = run.latents(vae)
    base, text_encoder = run.transformer(latents)
    high = run.expert("expert_high", recipe.boundary_ratio, 1.0, base, text_encoder, latents)
    low = run.expert("expert_low", 0.0, recipe.boundary_ratio, base, text_encoder, latents)

    packed = run.work / "packed"
    shutil.rmtree(packed, ignore_errors=True)
    teacher = packed / "teacher"
    pack(teacher, recipe, vae, text_encoder, high, low)
    save_judge(judge, packed / "judge.safetensors")

    parts = {"transformer": high, "transformer_2": low, "vae": vae, "text_encoder": text_encoder, "judge": judge}
    stages = ("judge", "vae", "latents", "transformer", "expert_high", "expert_low")
    record = {
        "schema": 1,
        "tiny": recipe == TINY,
        "seed": run.seed,
        "parameters": {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()},
        "weight_bytes": weight_bytes(teacher),
        "stages": {name: run.record(name) for name in stages},
        "accuracy": evaluate_teacher(
            teacher, load_judge(path=packed / "judge.safetensors"), recipe.evaluation, run.device, run.log
        ),
        "evaluated_on": f"{hardware(run.device)}, {software()}",
        "recipe": asdict(recipe),
    }
    (teacher / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    (teacher / "README.md").write_text(model_card(record))
    return packed, record
