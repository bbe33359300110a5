"""A placement that is no part of wandistill: this file and one line in `BUILDERS` are all that it takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wandistill.models.forward import forward
from wandistill.teacher import Setting
from wandistill.teacher.base import Expert, Prompt, Request, TeacherOutput
from wandistill.teacher.layout import Precision


class EagerTeacher:
    """Computes at once, when it is asked."""

    def __init__(self, setting: Setting) -> None:
        self._step = setting.config.teacher_micro_batch
        self._timed = setting.folder.expand_timesteps
        device = setting.world.device
        self._models = {e: setting.folder.load_transformer(e, setting.dtype, device) for e in setting.folder.experts}
        if Precision.of(setting.dtype, device).compute == torch.float32:
            self._models = {expert: model.float() for expert, model in self._models.items()}

    def request(
        self, x: Tensor, t: Tensor, prompt: Prompt, expert: Expert, guidance: float, features: Sequence[int] = ()
    ) -> TeacherOutput:
        request = Request(x, t, prompt, expert, guidance, tuple(features))
        inputs = request.model_inputs()
        pieces = zip(*(tensor.split(self._step or len(inputs[0])) for tensor in inputs), strict=True)
        answers = [
            forward(self._models[expert], *piece, request.features, expand_timesteps=self._timed) for piece in pieces
        ]
        joined = {index: [kept[index] for _, kept in answers] for index in request.features}
        velocity = [velocity for velocity, _ in answers]
        return request.output(torch.cat(velocity), {index: torch.cat(pieces) for index, pieces in joined.items()})

    def result(self, ticket: object) -> TeacherOutput:
        assert isinstance(ticket, TeacherOutput)
        return ticket

    def weight(self, expert: Expert, name: str) -> None:
        """The student's first weights come from the files."""

    def close(self) -> None:
        self._models.clear()


def build(setting: Setting) -> EagerTeacher:
    return EagerTeacher(setting)
