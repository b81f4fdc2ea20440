"""Monitor (or Guard) in the trainers of the field, one line each:

    Trainer(..., callbacks=[evenkeel.integrations.TrainerCallback("runs/mine")])              transformers
    Trainer(callbacks=[evenkeel.integrations.LightningCallback("runs/mine")])                 Lightning
    evenkeel.integrations.attach(trainer.model_parts[0], trainer.optimizers, "runs/mine")     torchtitan, any optimiser
    for batch in evenkeel.integrations.watched(batches, model, "runs/mine"): ...              a plain loop

guard=True makes it a Guard; every other option is Monitor's (or Guard's)."""
import importlib

import torch

from ._guard import Guard
from ._watch import Monitor


def _make(model, folder, guard, optimizer, options):
    return Guard(model, optimizer, folder, **options) if guard else Monitor(model, folder, **options)


def _base(*names):
    """The first of these classes that can be imported; a plain class without one, so that this module always loads."""
    for name in names:
        module, _, kind = name.rpartition(".")
        try:
            return getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError):
            continue
    return object


def TrainerCallback(folder, guard=False, **options):
    """A transformers TrainerCallback. The loss is that of each optimiser step, whatever logging_steps says."""
    base = _base("transformers.TrainerCallback", "transformers.trainer_callback.TrainerCallback")

    class EvenkeelCallback(base):
        monitor = _loss = _hook = None

        def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
            self._losses = []
            self.monitor = _make(model, folder, guard, optimizer, {"first_step": state.global_step, **options})
            self._hook = model.register_forward_hook(self._seen)

        def _seen(self, module, arguments, output):
            loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
            if torch.is_grad_enabled() and isinstance(loss, torch.Tensor):
                self._losses.append(loss.detach())

        def on_step_end(self, args, state, control, optimizer=None, lr_scheduler=None, **_):
            losses, self._losses = self._losses, []
            if losses:
                rate = None if optimizer is None else optimizer.param_groups[0]["lr"]
                self.monitor.step(torch.stack([loss.float().mean() for loss in losses]).mean(), lr=rate)

        def on_train_end(self, args, state, control, **_):
            self._hook.remove()
            self.monitor.close()

    return EvenkeelCallback()


def LightningCallback(folder, guard=False, **options):
    """A Lightning callback; numbers also go to the trainer's loggers."""
    base = _base("lightning.pytorch.Callback", "pytorch_lightning.Callback", "lightning.pytorch.callbacks.Callback")

    class EvenkeelCallback(base):
        monitor = None

        def on_train_start(self, trainer, module):
            optimizers = getattr(trainer, "optimizers", None) or [None]
            loggers = [*options.get("loggers", ()), *(getattr(trainer, "loggers", None) or ())]
            self.monitor = _make(module, folder, guard, optimizers[0],
                                 {"first_step": trainer.global_step, **options, "loggers": loggers})
            self._losses, self._step = [], trainer.global_step

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_index, *_):
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if isinstance(loss, torch.Tensor):
                # Lightning divides the loss of a part by the number of parts.
                self._losses.append(loss.detach().float() * getattr(trainer, "accumulate_grad_batches", 1))
            if trainer.global_step != self._step and self._losses:
                self._step, losses, self._losses = trainer.global_step, self._losses, []
                optimizers = getattr(trainer, "optimizers", None)
                self.monitor.step(torch.stack(losses).mean(), lr=optimizers[0].param_groups[0]["lr"] if optimizers else None)

        def on_train_end(self, trainer, module):
            self.monitor.close()

    return EvenkeelCallback()


def attach(model, optimizers, folder, guard=False, **options):
    """torchtitan, or any loop: every optimiser step is a step of the run, with the mean of the model's losses since the one
    before. The optimizers: one, a list, or torchtitan's container. The model returns a loss, or its trainer calls
    monitor.note_loss(loss). Returns the monitor; close() detaches it."""
    one = list(optimizers) if not hasattr(optimizers, "step") or isinstance(optimizers, (list, tuple)) else [optimizers]
    inner = getattr(optimizers, "optimizers", None) or one
    last = list(inner)[-1]
    monitor, losses = _make(model, folder, guard, last, options), []
    monitor.note_loss = lambda loss: losses.append(loss.detach().float().mean())
    original, close = last.step, monitor.close

    def seen(module, arguments, output):
        loss = output if isinstance(output, torch.Tensor) and output.dim() == 0 else getattr(output, "loss", None)
        if torch.is_grad_enabled() and isinstance(loss, torch.Tensor):
            monitor.note_loss(loss)

    hook = model.register_forward_hook(seen)

    def step(*arguments, **given):
        result = original(*arguments, **given)
        if losses:
            monitor.step(torch.stack(losses).mean(), lr=last.param_groups[0]["lr"])
            losses.clear()
        return result

    def detach():
        last.step = original
        hook.remove()
        close()

    last.step, monitor.close = step, detach
    return monitor


def watched(batches, model, folder, optimizer=None, guard=False, **options):
    """A plain loop's batches, one for each step; the model returns its loss. The run's folder is written on the way."""
    monitor, losses = _make(model, folder, guard, optimizer, options), []

    def seen(module, arguments, output):
        loss = output if isinstance(output, torch.Tensor) and output.dim() == 0 else getattr(output, "loss", None)
        if torch.is_grad_enabled() and isinstance(loss, torch.Tensor):
            losses.append(loss.detach().float())

    hook = model.register_forward_hook(seen)
    try:
        for batch in batches:
            yield batch
            if losses:
                monitor.step(torch.stack(losses).mean(), lr=None if optimizer is None else optimizer.param_groups[0]["lr"])
                losses.clear()
    finally:
        hook.remove()
        monitor.close()
