"""dash_attn.watch: hooks that record a fingerprint of every tensor that passes a module, step by step."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dash_attn.watching import environment
from dash_attn.watching.files import Environment, Step, Writer, bits_of, path_of, remove_from, share_of
from dash_attn.watching.fingerprint import WHOLE, Share
from dash_attn.watching.hooks import Guard, Hook, compile_again, is_unreal, recomputes, stack_depth, tell
from dash_attn.watching.recording import Named, OpenStep, Reads, Seen, Texts, version
from dash_attn.watching.scope import Scope, ScopeOptions
from dash_attn.watching.tensors import KnownSettings, clean, is_layer, named, parameters_of, unwrapped

if TYPE_CHECKING:
    from typing_extensions import Unpack


def watch(
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    to: str | PathLike[str],
    **scope: Unpack[ScopeOptions],
) -> Watcher:
    """Record a fingerprint of every tensor of a training run in the folder `to`, for `dash-attn diff`.

    Call it once, after the model is wrapped (DDP, `fully_shard`) and the optimizer is made, before the first step.
    Every process of a distributed run writes a file of its own. The record is complete after `close()`, which also runs
    when the process ends.

    optimizer  one or several. A step ends with the step of the optimizer, or of the last of several. Without an
               optimizer a step ends when the next forward starts after a backward
    steps      the steps to record, for example `range(0, 10**9, 100)`. None, the default, means all
    depth      with 2, the inputs and outputs of modules as deep as `blocks.0` are recorded, and not those of modules
               inside them. None means all modules, as by default. Parameters and their gradients are always recorded
    share      how much of a large tensor (1 MiB or more) is read in a step if a layer of torch.nn computes it: its
               output, and the gradient of its input. It is 1 / n, by default 1 / 16. Steps read other pieces: n steps
               read all of them. Two runs read the same pieces in the same step. 1 reads everything. What other code
               computes, such as attention and your own modules, is always read whole. So are small tensors,
               parameters, their gradients and the state of the optimizer
    first_step the number of the first step, 0 by default. A training that goes on from a checkpoint after step 99 gives
               100, so that `diff` can compare it with one that did not stop
    """
    asked = Scope(**scope)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    given = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    watcher = Watcher(unwrapped(model), Path(to), asked)
    try:
        for each in given:
            watcher.add_optimizer(each)
    except ValueError:
        watcher.close()
        raise
    return watcher


class Watcher:
    """The hooks of one model and the file that they write to. `watch` makes one."""

    def __init__(self, model: nn.Module, to: Path, scope: Scope) -> None:
        self._model, self._scope, self._rank = model, scope, environment.rank()
        self._writer = Writer(path_of(to, self._rank))
        if self._rank == 0 and (count := environment.world_size()):
            remove_from(to, count)
        self._guard = Guard()
        self._gradient_hook = Hook(self._guard, self._gradient)
        self._optimizers, self._settings = list[Optimizer](), list[KnownSettings]()
        self._handles: list[Any] = []
        self._pending: deque[OpenStep] = deque()
        self._gradients: dict[int, list[Named]] = {}  # of parameters, by the backward that gives them
        self._texts = Texts()
        self._open = OpenStep(scope.first_step, scope.one_in, self._texts)
        self._facts: Environment = {}
        self._written: tuple[OpenStep, Step] | None = None
        self._distributed = environment.distributed()
        self._active = self._continued = self._had_backward = False
        self._told_unknown = False  # has an optimizer that is not given changed the model
        self._updating: int | None = None  # frames on the stack when a given optimizer began its step
        self._inside: list[nn.Module] = []  # modules whose forwards run, inside each other
        self._started = 0  # frames on the stack when the model was called from outside
        self._leaves: list[Any] = []  # hooks on tensors that may live longer than the step
        self._versions: dict[int, int] = {}  # of parameters and buffers after the last update, by id
        self._hook_modules()
        unknown = Hook(self._guard, self._after_unknown_update)
        self._handles.append(register_optimizer_step_post_hook(unknown))  # of all optimizers
        compile_again()
        self._frames = environment.compiled_frames()
        atexit.register(self.close)

    # ---- what scripts call ---------------------------------------------------------------------------------

    def see(self, name: str, value: Any) -> None:
        """Record tensors that pass no module, for example the targets of a batch."""
        Hook(self._guard, self._see)(name, value)

    def _see(self, name: str, value: Any) -> None:
        self._record("data", named("", value, name), self._open.whole)

    def end_step(self) -> None:
        """End the step. Only scripts without an optimizer need it, and only if a step has several backwards."""
        Hook(self._guard, self._end_step)()

    def _end_step(self) -> None:
        if is_unreal():
            return
        done, self._continued = self._open, self._recording
        if done.rows:
            self._facts = self._facts or self._environment()
            done.slots.send()
            self._pending.append(done)
        done.end()
        for handle in self._leaves:
            handle.remove()
        self._leaves.clear()
        self._open, self._had_backward = OpenStep(done.number + 1, self._scope.one_in, self._texts), False
        while self._pending and self._pending[0].slots.arrived():
            self._write(self._pending.popleft())

    def close(self) -> None:
        """Remove the hooks, wait for the last fingerprints and close the file."""
        if not self._handles:
            return
        atexit.unregister(self.close)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        compile_again()
        if self._guard.is_forked:
            self._writer.leave()
            return
        self.end_step()
        try:
            while self._pending:
                self._pending[0].slots.wait()
                self._write(self._pending.popleft())
        except Exception as error:
            self._guard.stop(error)
        self._writer.close()

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Watch another optimizer of the model. A step then ends with the step of this one."""
        if not self.trains(optimizer):
            raise ValueError("the optimizer has no parameter of the model: make it after the model is wrapped")
        self._optimizers.append(optimizer)
        self._settings.append(KnownSettings())
        before, after = (Hook(self._guard, method) for method in (self._before_update, self._after_update))
        self._handles.append(optimizer.register_step_pre_hook(before))
        self._handles.append(optimizer.register_step_post_hook(after))

    def trains(self, optimizer: Optimizer) -> bool:
        """Has the optimizer a parameter of the model?"""
        return any(id(parameter) in self._owners for parameter in parameters_of(optimizer))

    @property
    def has_written(self) -> bool:
        """Is a step in the file?"""
        return self._written is not None

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- hooks ---------------------------------------------------------------------------------------------

    def _hook_modules(self) -> None:
        self._owners: dict[int, tuple[str, str]] = {}
        self._unhooked: list[tuple[str, str, nn.Parameter]] = []
        self._modules: list[tuple[str, nn.Module]] = []  # a walk through a model takes long
        for path, module in self._model.named_modules():
            name = clean(path)
            self._modules.append((name, module))
            scripted = isinstance(module, torch.jit.ScriptModule)  # takes no hooks of Python
            if not scripted and self._scope.has_module(name):
                layer = is_layer(module)
                before, after = (Hook(self._guard, partial(call, name, layer)) for call in (self._before, self._after))
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                # Also called after an exception, so that it is known which forwards still run.
                self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
            for own, parameter in module.named_parameters(recurse=False):
                self._owners.setdefault(id(parameter), (name, own))
                self._unhooked.append((name, own, parameter))
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Hook the parameters that have gradients. Frozen and lazy ones may have them in a later step."""
        given, self._unhooked = self._unhooked, []
        for name, own, parameter in given:
            if parameter.requires_grad and not is_lazy(parameter):
                hook = Hook(self._guard, partial(self._parameter_gradient, name, own))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            else:
                self._unhooked.append((name, own, parameter))

    def _before(self, name: str, layer: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        again = recomputes()
        if module is self._model and not again:
            depth = stack_depth()
            if depth <= self._started:  # no call inside its own: a KeyboardInterrupt has left what is there
                self._inside.clear()
            if not self._inside:
                self._started = depth
        outermost = not self._inside
        self._inside.append(module)
        if outermost:
            self._active = torch.is_grad_enabled() and not is_unreal()  # evaluation is no part of a step
            if self._active and not again:
                self._begin()
        if self._active:
            passed = named(name, args, "input")
            if kwargs:
                passed += named(name, kwargs, "input")
            # No layer has made an input that is new here: layers' outputs are known.
            if outermost and not again:
                self._pass("data", [each for each in passed if each[2].grad_fn is None], WHOLE, layer)
                self._pass("script", [each for each in passed if each[2].grad_fn is not None], WHOLE, layer)
            else:
                self._pass("recompute" if again else "forward", passed, WHOLE, layer)

    def _after(self, name: str, layer: bool, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        # After an error in a hook of the script the module may not be there, or modules inside it may be left.
        if module in self._inside:
            while self._inside.pop() is not module:
                pass
        if self._active:
            share = self._open.share if layer else WHOLE
            self._pass("recompute" if recomputes() else "forward", named(name, out, "output"), share, False)

    def _pass(self, phase: str, passed: list[Named], share: Share, feeds_layer: bool) -> None:
        """Record tensors, and their gradients when these come."""
        if not passed or not self._recording:
            return
        reads = self._open.passing
        self._open.record(phase, passed, reads, share)
        for module, name, tensor in passed:
            if tensor.requires_grad and (entry := reads.seen.get(id(tensor))) is not None:
                if feeds_layer:
                    entry.feeds_layer = True
                if not entry.hooked:
                    entry.hooked = True
                    hook = partial(self._gradient_hook, module, name, entry)
                    handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                    if tensor.grad_fn is None:
                        self._leaves.append(handle)

    def _gradient(self, module: str, name: str, entry: Seen, gradient: Tensor) -> None:
        """Who reads a tensor in the forward computes its gradient. By now all of them are known."""
        self._had_backward = True
        share = self._open.share if entry.feeds_layer else WHOLE
        self._record("backward", named(module, gradient, name), self._open.passing, share)

    def _parameter_gradient(self, module: str, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if self._distributed:  # a reduction may start to write to it as soon as this returns
            self._had_backward = True
            self._record("backward", named(module, gradient, name), self._open.whole)
            return
        backward = torch._C._current_graph_task_id()
        if backward not in self._gradients:
            self._gradients[backward] = []
            ended = Hook(self._guard, partial(self._end_backward, backward))
            torch.autograd.Variable._execution_engine.queue_callback(ended)
        self._gradients[backward].append((module, name, gradient))

    def _end_backward(self, backward: int) -> None:
        """The gradients of all parameters, in one launch."""
        self._had_backward, gradients = True, self._gradients.pop(backward, [])
        flat = [each for module, name, gradient in gradients for each in named(module, gradient, name)]
        self._record("backward", flat, self._open.whole)

    def _begin(self) -> None:
        """At the start of an outermost forward."""
        self._gradients.clear()  # backwards that ended in an error have left them
        self._distributed = environment.distributed()
        if self._had_backward and not self._optimizers:
            self._end_step()
        if not self._recording:
            return
        if not self._open.began:
            self._hook_parameters()
            state = self._tensors("_parameters") + self._tensors("_buffers")
            if self._continued and self._optimizers:  # only what the script has changed after the update
                state = [each for each in state if self._versions.get(id(each[2])) != version(each[2])]
            self._record("start", state, self._open.whole)
        self._open.began = True
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        for name, value in environment.random_states(device):
            self._open.record_host("random", name, value)

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        self._updating = stack_depth()
        if not self._recording:
            return
        gradients = list[Named]()
        for parameter in parameters_of(optimizer):
            module, name = self._owner(parameter)
            gradients += named(module, parameter.grad, f"gradient of {name}")
        self._record("reduce", gradients, self._open.whole)
        number = self._optimizers.index(optimizer)
        for name, value in self._settings[number].changed(optimizer):
            name = f"{name} of optimizer {number}" if number else name
            if isinstance(value, Tensor):  # its value may be on a GPU
                self._record("setting", named("", value, name), self._open.whole)
            else:
                self._open.record_host("setting", name, bits_of(value))

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        last, self._updating = optimizer is self._optimizers[-1], None
        if self._recording:
            parameters = list[Named]()
            if last:
                buffers, parameters = self._tensors("_buffers"), self._tensors("_parameters")
                self._record("buffer", buffers, self._open.whole)
                self._versions = {id(tensor): version(tensor) for _, _, tensor in (*parameters, *buffers)}
            self._record("update", [*parameters, *self._state_of(optimizer)], self._open.whole)
        if last:
            self._inside.clear()  # what a KeyboardInterrupt has left
            self._end_step()

    def _after_unknown_update(self, optimizer: Optimizer, *_: object) -> None:
        """An optimizer that replaces a given one does not end steps."""
        if self._told_unknown or not self._optimizers or optimizer in self._optimizers:
            return
        # It may be inside a given one. A step that ended in an error is over, and has no frames on the stack.
        if self._updating is not None and stack_depth() > self._updating:
            return
        # A wrapper of a given optimizer ends after it, when the next step has not begun.
        if self._open.began and self.trains(optimizer):
            self._told_unknown = True
            told = "dash_attn.watch: an optimizer that it does not know changes the model, and ends no step"
            tell(f"{told}: give it to watch, or call add_optimizer of the watcher")

    def _state_of(self, optimizer: Optimizer) -> list[Named]:
        state, scalars = list[Named](), dict[tuple[str, torch.dtype, torch.device], list[Tensor]]()
        for parameter in parameters_of(optimizer):
            module, name = self._owner(parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.numel() == 1:
                    # One for each parameter, as Adam's counter of steps: together they are one tensor.
                    scalars.setdefault((key, value.dtype, value.device), []).append(
                        value if value.dim() == 0 else value.reshape(())
                    )
                else:
                    state += named(module, value, f"{key} of {name}")
        with torch.no_grad():
            state += [("", f"{key} of all parameters", torch.stack(each)) for (key, *_), each in scalars.items()]
        return state

    # ---- records -------------------------------------------------------------------------------------------

    @property
    def _recording(self) -> bool:
        return self._scope.has_step(self._open.number) and not is_unreal()

    def _record(self, phase: str, tensors: Sequence[Named], reads: Reads, share: Share = WHOLE) -> None:
        if tensors and self._recording:
            self._open.record(phase, tensors, reads, share)

    def _write(self, done: OpenStep) -> None:
        step = done.step(self._written)
        try:
            if self._written is None:
                self._writer.environment(self._facts)
            self._writer.step(step)
        except Exception:  # as of a full disk
            self._pending.clear()
            raise
        self._written = done, step

    def _owner(self, parameter: Tensor) -> tuple[str, str]:
        """The module of a parameter and its name in the module."""
        return self._owners.get(id(parameter), ("", "a parameter outside the model"))

    def _tensors(self, of: Literal["_parameters", "_buffers"]) -> list[Named]:
        """The parameters or the buffers of the model, each once."""
        tensors, ids = list[Named](), set[int]()
        for path, module in self._modules:
            for name, tensor in getattr(module, of).items():
                if tensor is not None and id(tensor) not in ids:
                    ids.add(id(tensor))
                    tensors += named(path, tensor, name)
        return tensors

    def _environment(self) -> Environment:
        """The environment as it is after a step, not before the first: scripts set flags late."""
        return {
            **environment.environment(),
            "rank": self._rank,  # a process group may end before the record
            "depth": self._scope.depth,
            "share": share_of(self._scope.one_in),
            "compiled": environment.compiled_frames() > self._frames,
            "modules": {clean(path): type(module).__name__ for path, module in self._model.named_modules()},
        }
