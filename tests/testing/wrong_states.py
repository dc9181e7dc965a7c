"""Backends of state layers with one error each, and right ones, one per form.

`WRONG_STATES[error]` is (backend, check meant to detect it). Most errors are of a kind that public
issues of serving engines report.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

import attnlib
from attnlib.backends.state_impl import StateInputs
from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.states import TorchStateImpl
from attnlib.cache.states import StateCache
from attnlib.layer.state_fused import separate_step
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states.batch import StateRequest
from attnlib.ops.states.step_form import FusedInputs
from attnlib.ops.torch.states.exchange import read_state
from attnlib.ops.torch.states.state_step import state_step

__all__ = ["RIGHT_STATES", "WRONG_STATES"]


class _States(attnlib.AttentionBackend):
    """Serves state layers only, in one form."""

    impl: ClassVar[type[attnlib.StateImpl]] = TorchStateImpl

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return cls.__name__.lower()

    @classmethod
    def get_state_impl_cls(cls) -> type[attnlib.StateImpl]:  # type: ignore[override]
        return cls.impl


def _backend(
    impl: type[attnlib.StateImpl], form: str = "plain", invariant: bool = False
) -> type[attnlib.AttentionBackend]:
    """A backend that declares all that the form can do, and runs `impl`."""
    declared = dataclasses.replace(
        TorchBackend.state_capabilities,
        forms=(form,),
        batch_invariant=invariant,
        max_rollback=0 if form == "plain" else 8,
    )
    body = {"state_capabilities": declared, "impl": impl, "__module__": __name__}
    return type(impl.__name__ + form.title(), (_States,), body)


RIGHT_STATES: dict[str, type[attnlib.AttentionBackend]] = {
    form: _backend(TorchStateImpl, form, form == "tail") for form in ("plain", "snapshots", "tail")
}
"""Form -> a right backend."""


def _requests(metadata: StateMetadata) -> list[StateRequest]:
    return list(metadata.batch.requests())


def _with_seq_lens(metadata: StateMetadata, lengths: torch.Tensor) -> StateMetadata:
    fields = {**metadata.__getstate__(), "seq_lens": lengths, "seq_lens_cpu": lengths}
    return StateMetadata.from_fields(fields)


class _ReadsFreshSlot(TorchStateImpl):
    """A first step of one token is taken for a decode: it continues from what the slot held."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        lengths, fresh = metadata.seq_lens.clone(), []
        for request in _requests(metadata):
            high = int(cache.tensors.positions[request.slot, 0, 0, 1])
            if request.end == 1 and high > 0:
                lengths[request.number] = high + 1
                fresh.append(request.slot)
        super().step(inputs, cache, _with_seq_lens(metadata, lengths), output)
        cache.tensors.positions[fresh] = 1


class _RollbackOffByOne(TorchStateImpl):
    """Continues one token too far after a step of which a part was rejected."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        state = cache.tensors.state
        for _, _, n, _, source, _ in _requests(metadata):
            if 0 < n < int(cache.tensors.positions[source, 0, 0, 1]):
                state[source, n % state.shape[1]] = state[source, (n + 1) % state.shape[1]]
        super().step(inputs, cache, metadata, output)


class _WindowNotRolledBack(TorchStateImpl):
    """The state follows the accepted tokens, the window of the convolution does not."""

    def convolve(
        self, x: torch.Tensor, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        window = cache.tensors.window
        for _, _, n, _, source, _ in _requests(metadata):
            back = int(cache.tensors.window_positions[source, 1]) - n
            if n and back > 0:
                before = window[source].clone()
                for p in range(max(n - self.spec.conv_width + 1, 0), n):
                    window[source, p % len(before)] = before[(p + back) % len(before)]
        super().convolve(x, cache, metadata, output)


class _WindowFromStepOnly(TorchStateImpl):
    """The new window is the end of this step: a step shorter than W - 1 forgets older inputs."""

    def convolve(
        self, x: torch.Tensor, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().convolve(x, cache, metadata, output)
        window = cache.tensors.window
        for _, _, n, _, _, slot in _requests(metadata):
            for p in range(max(n - self.spec.conv_width, 0), n):
                window[slot, p % window.shape[1]] = 0


class _WindowOfOutputs(TorchStateImpl):
    """The window keeps what the convolution returned."""

    def convolve(
        self, x: torch.Tensor, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().convolve(x, cache, metadata, output)
        window = cache.tensors.window
        for request in _requests(metadata):
            last = range(max(request.computed, request.end - self.spec.conv_width), request.end)
            for p in last:
                row = output[request.start + p - request.computed]
                window[request.slot, p % window.shape[1]] = row


class _BiasAfterActivation(TorchStateImpl):
    """`act(sum) + bias` in place of `act(sum + bias)`."""

    def convolve(
        self, x: torch.Tensor, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        bias = self.owner.conv_bias
        if bias is None or self.spec.conv_activation is None:
            super().convolve(x, cache, metadata, output)
            return
        self.owner.conv_bias = None
        super().convolve(x, cache, metadata, output)
        self.owner.conv_bias = bias
        for request in _requests(metadata):
            output[request.rows] += bias


class _TransposedBetweenPhases(TorchStateImpl):
    """Prefills store [Dk, Dv], decodes read [Dv, Dk]. With Dk = Dv no shape is wrong."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().step(inputs, cache, metadata, output)
        state = cache.tensors.state
        for request in _requests(metadata):
            if request.end - request.computed > 1 and state.shape[-1] == state.shape[-2]:
                state[request.slot] = state[request.slot].mT.clone()


class _PaddingWritesLastSlot(TorchStateImpl):
    """Slot -1 is an index: padding overwrites the last slot of the pool."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().step(inputs, cache, metadata, output)
        starts = metadata.query_start_loc
        padded = (metadata.state_slots < 0) & (starts[1:] > starts[:-1])
        if bool(padded.any()):
            cache.tensors.state[-1] = 0


class _EmptyRequestResets(TorchStateImpl):
    """A request without new tokens in this step loses its state."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().step(inputs, cache, metadata, output)
        starts = metadata.query_start_loc
        empty = (metadata.state_slots >= 0) & (starts[1:] == starts[:-1])
        cache.tensors.state[metadata.state_slots[empty].long()] = 0


class _InterleavedHeads(TorchStateImpl):
    """State head h reads key head h % Hk in place of h // (Hv / Hk)."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        keys = self.spec.num_key_heads
        order = torch.arange(self.spec.num_heads).reshape(-1, keys).T.reshape(-1)
        query, key, value, decay, beta = inputs
        constant = decay.dim() == 1
        moved = StateInputs(
            query,
            key,
            value[:, order],
            decay[order] if constant else decay[:, order],
            None if beta is None else beta[:, order],
        )
        skip, self.owner.skip = self.owner.skip, None
        out = torch.empty_like(output)
        super().step(moved, cache, metadata, out)
        self.owner.skip = skip
        output[:, order] = out
        if skip is not None:
            for request in _requests(metadata):
                output[request.rows] += skip[:, None] * value[request.rows]


class _Loop(TorchStateImpl):
    """The rules in a loop over tokens, for errors inside the recurrence. Right by itself, in the
    form `plain`."""

    def update(self, state: torch.Tensor, factor: torch.Tensor, k: Any, v: Any, b: Any) -> Any:
        """The state after a token."""
        state = state * factor
        return state + self.change(state, k, v, b).unsqueeze(-1) * k.unsqueeze(-2)

    def change(self, state: torch.Tensor, k: Any, v: Any, b: Any) -> Any:
        """u, [Hv, Dv]."""
        held = (state @ k.unsqueeze(-1)).squeeze(-1) if self.spec.update == "delta" else 0
        return b * (v - held)

    def factor(self, decay: torch.Tensor) -> torch.Tensor:
        """The decay, [Hv, 1, 1 or Dk]."""
        return decay.exp().reshape(self.spec.num_heads, 1, -1)

    def norm(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled queries and keys."""
        if self.spec.qk_norm:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        return q * self.scale, k

    def read(self, state: torch.Tensor, q: Any, v: Any) -> Any:
        """o, [Hv, Dv]."""
        skip = self.owner.skip
        out = (state @ q.unsqueeze(-1)).squeeze(-1)
        return out if skip is None else out + skip[:, None] * v

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        tensors, ratio = cache.tensors, self.spec.group_size
        before, results = tensors.state[:, 0].clone(), {}
        super().step(inputs, cache, metadata, output.clone())  # positions, and the refusals
        for request in _requests(metadata):
            state = before[request.source] if request.computed else torch.zeros_like(before[0])
            for t in range(*request.rows.indices(len(inputs.value))):
                q, k = (x[t].repeat_interleave(ratio, 0) for x in inputs[:2])
                q, k = self.norm(q, k)
                decay = inputs.log_decay if inputs.log_decay.dim() == 1 else inputs.log_decay[t]
                beta = 1.0 if inputs.beta is None else inputs.beta[t].unsqueeze(-1)
                state = self.update(state, self.factor(decay), k, inputs.value[t], beta)
                output[t] = self.read(state, q, inputs.value[t])
            results[request.slot] = state
        rows = torch.zeros(len(output), dtype=torch.bool)
        for request in _requests(metadata):
            rows[request.rows] = True
        output[~rows] = 0
        for slot, state in results.items():
            tensors.state[slot, 0] = state


class _DeltaBeforeDecay(_Loop):
    """The delta is taken against the state before its decay."""

    def update(self, state: torch.Tensor, factor: torch.Tensor, k: Any, v: Any, b: Any) -> Any:
        return state * factor + self.change(state, k, v, b).unsqueeze(-1) * k.unsqueeze(-2)


class _BetaOfValueOnly(_Loop):
    """`beta * v - S' k` in place of `beta * (v - S' k)`."""

    def change(self, state: torch.Tensor, k: Any, v: Any, b: Any) -> Any:
        held = (state @ k.unsqueeze(-1)).squeeze(-1) if self.spec.update == "delta" else 0
        return b * v - held


class _OutputBeforeUpdate(_Loop):
    """The output reads the state before the token."""

    def update(self, state: torch.Tensor, factor: torch.Tensor, k: Any, v: Any, b: Any) -> Any:
        self.__dict__["before"] = state * factor
        return super().update(state, factor, k, v, b)

    def read(self, state: torch.Tensor, q: Any, v: Any) -> Any:
        return super().read(self.__dict__["before"], q, v)


class _FactorOfTwo(_Loop):
    """The logarithm is taken for one to the base 2."""

    def factor(self, decay: torch.Tensor) -> torch.Tensor:
        return super().factor(decay * 0.6931471805599453)


class _DecayIsAFactor(_Loop):
    """A wrapper of a kernel that takes the decay itself, and gets its logarithm + 1."""

    def factor(self, decay: torch.Tensor) -> torch.Tensor:
        return (1 + decay).reshape(self.spec.num_heads, 1, -1)


class _ScaleBeforeNorm(_Loop):
    """q is scaled, and then normalized: the scale is lost."""

    def norm(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = super().norm(q, k)
        return (q / self.scale, k) if self.spec.qk_norm else (q, k)


class _NormWithoutEpsilon(_Loop):
    """q and k are divided by their norm: a zero vector gives NaN."""

    def norm(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.spec.qk_norm:
            return super().norm(q, k)
        return self.scale * q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)


class _ScaledSkip(_Loop):
    """`scale * (S q + skip * v)`."""

    def read(self, state: torch.Tensor, q: Any, v: Any) -> Any:
        skip = self.owner.skip
        scaled = None if skip is None else skip * self.scale
        out = (state @ q.unsqueeze(-1)).squeeze(-1)
        return out if scaled is None else out + scaled[:, None] * v


class _FactoredChannelDecay(TorchStateImpl):
    """A prompt multiplies q by exp(c) and k by exp(-c): infinite when a channel decays fast."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().step(inputs, cache, metadata, output)
        if self.spec.decay != "channel" or self.spec.update != "add":
            return
        for request in _requests(metadata):
            rows = request.rows
            if request.computed or request.end < 2:
                continue
            q, k = (x[rows].repeat_interleave(self.spec.group_size, 1) for x in inputs[:2])
            total = inputs.log_decay[rows].cumsum(0)
            q, k = self.scale * q * total.exp(), k * (-total).exp()
            scores = torch.einsum("ihd,jhd->hij", q, k).tril()
            output[rows] = torch.einsum("hij,jhv->ihv", scores, inputs.value[rows])


class _RoundedBetweenSteps(TorchStateImpl):
    """Keeps a float32 state in bfloat16 between steps."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().step(inputs, cache, metadata, output)
        state = cache.tensors.state
        for request in _requests(metadata):
            state[request.slot] = state[request.slot].bfloat16().to(state.dtype)


class _ChunksFromStepStart(TorchStateImpl):
    """Correct to rounding, but its chunks begin where a step begins, and it declares invariance."""

    hidden: ClassVar[WeakKeyDictionary[StateCache, StateCache]] = WeakKeyDictionary()

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().step(inputs, cache, metadata, output)
        spec = self.spec.replace(form="snapshots", batch_invariant=False)
        other = self.hidden.get(cache)
        if other is None:
            other = self.hidden[cache] = StateCache.allocate(spec, cache.num_slots)
        state_step(inputs, other.tensors, metadata.batch, self.params, out=output)


class _SourceWritten(TorchStateImpl):
    """A fork updates its source in place, and copies it."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().step(inputs, cache, metadata, output)
        for request in _requests(metadata):
            if request.source != request.slot and request.computed:
                cache.tensors.state[request.source] = cache.tensors.state[request.slot]


class _ForkWithoutTail(TorchStateImpl):
    """A fork gets the state of its source, and not the inputs since then."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        key = cache.tensors.tail_key
        before = key.clone()
        super().step(inputs, cache, metadata, output)
        for _, _, n, _, source, slot in _requests(metadata):
            if source != slot and n:
                for p in range(n // 16 * 16, n):
                    key[slot, p % key.shape[1]] = before[slot, p % key.shape[1]]


class _ForkWithOwnWindow(TorchStateImpl):
    """A fork reads the window of its new slot."""

    def convolve(
        self, x: torch.Tensor, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        window, held = cache.tensors.window, {}
        for _, _, n, _, source, slot in _requests(metadata):
            if source != slot and n:
                held[source] = window[source].clone()
                window[source] = window[slot].nan_to_num(0.0)
        super().convolve(x, cache, metadata, output)
        for source, kept in held.items():
            window[source] = kept


class _DraftsStayInTheTail(TorchStateImpl):
    """New tokens are appended behind rejected ones, which stay in the sums."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        lengths = metadata.seq_lens.clone()
        for request in _requests(metadata):
            high = int(cache.tensors.positions[request.source, 0, 0, 1])
            if 0 < request.computed < high:
                lengths[request.number] += high - request.computed
        super().step(inputs, cache, _with_seq_lens(metadata, lengths), output)
        for request in _requests(metadata):
            cache.tensors.positions[request.slot, ..., 1] = request.end


class _FoldsDrafts(TorchStateImpl):
    """A full chunk is added to the state at once, also when its last tokens may be rejected."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().step(inputs, cache, metadata, output)
        layout, tensors = cache.layout, cache.tensors
        for request in _requests(metadata):
            full = layout.chunk_start(request.end)
            low = int(tensors.positions[request.slot, 0, 0, 0])
            if layout.chunk_start(low) < full:
                own = self.owner.log_decay
                tensors.state[request.slot, 0] = read_state(
                    tensors, request.slot, full, self.params, own
                )


class _LowNotMoved(TorchStateImpl):
    """The first position that a slot can continue from stays 0: stale steps pass the check."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().step(inputs, cache, metadata, output)
        for request in _requests(metadata):
            cache.tensors.positions[request.slot, ..., 0] = 0


class _RowsPastTheBatch(TorchStateImpl):
    """Rows past the batch are not written."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        rows = slice(0, metadata.num_actual_tokens)
        given = [x if x is None or x.dim() == 1 else x[rows] for x in inputs]
        super().step(StateInputs(*given), cache, metadata, output[rows])


class _NanInAllRequests(TorchStateImpl):
    """A product over the whole batch with a mask of 0 and 1: NaN times 0 is NaN."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        super().step(inputs, cache, metadata, output)
        leak = inputs.value[: metadata.num_actual_tokens].sum() * 0
        for request in _requests(metadata):
            output[request.rows] += leak


class _DenseSlots(TorchStateImpl):
    """Inputs are read as if their rows were next to each other."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        value = inputs.value
        dense = value.as_strided(value.shape, (value.shape[1] * value.shape[2], value.shape[2], 1))
        super().step(inputs._replace(value=dense), cache, metadata, output)


def _fla_convention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None,
    scale: float, initial_state: torch.Tensor, cu_seqlens: torch.Tensor, delta: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A recurrence with the calling convention of flash-linear-attention: one packed batch
    `[1, T, H, D]`, states `[N, Hv, K, V]` in and out, normalized inputs."""
    out, final = torch.zeros_like(v), []
    for n, (start, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        state = initial_state[n]
        for t in range(int(start), int(end)):
            decay = g[0, t].exp()
            state = state * (decay[..., None] if decay.dim() == 2 else decay[:, None, None])
            change = v[0, t]
            if delta:
                change = change - torch.einsum("hkv,hk->hv", state, k[0, t])
            if beta is not None:
                change = beta[0, t, :, None] * change
            state = state + k[0, t, :, :, None] * change[:, None]
            out[0, t] = scale * torch.einsum("hkv,hk->hv", state, q[0, t])
        final.append(state)
    return out, torch.stack(final)


class _FlaWrapper(TorchStateImpl):
    """A wrapper of such a kernel over `plain` slots; right by itself."""

    reads_fresh: ClassVar[bool] = False
    transposes: ClassVar[bool] = True

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        before = cache.tensors.state[:, 0].clone()
        super().step(inputs, cache, metadata, output)  # positions, refusals and padding
        spec, requests, held = self.spec, _requests(metadata), cache.tensors.state[:, 0]
        order = (spec.num_heads, spec.key_size, spec.value_size)
        if not requests:
            return
        query, key, value, decay, beta = inputs
        if spec.qk_norm:
            query, key = (
                x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key)
            )
        query, key = (x.repeat_interleave(spec.group_size, 1) for x in (query, key))
        decay = decay.expand(len(value), -1) if decay.dim() == 1 else decay
        states = []
        for request in requests:
            if request.computed or self.reads_fresh:
                stored = before[request.source]
                states.append(stored.mT if self.transposes else stored.reshape(order))
            else:
                states.append(held.new_zeros(order))
        rows = torch.cat([torch.arange(*r.rows.indices(len(value))) for r in requests])
        starts = torch.tensor([0, *(r.end - r.computed for r in requests)]).cumsum(0)
        given = [None if x is None else x[rows][None] for x in (query, key, value, decay, beta)]
        initial, delta = torch.stack(states).nan_to_num(0.0), spec.update == "delta"
        out, final = _fla_convention(*given, self.scale, initial, starts, delta)
        skip = 0 if self.owner.skip is None else self.owner.skip[:, None] * value[rows]
        output[rows] = out[0] + skip
        for request, state in zip(requests, final, strict=True):
            stored = state.mT if self.transposes else state
            held[request.slot] = stored.reshape(held.shape[1:])


class _FlaReadsFreshSlots(_FlaWrapper):
    """Initial states are gathered for first steps too: there is no `has_initial_state` to forget,
    but a position of 0 to look at."""

    reads_fresh = True


class _FlaOrderInSlots(_FlaWrapper):
    """Slots hold `[K, V]`, as the kernel does: what another backend reads is transposed."""

    transposes = False


class _DecaysFromSums(TorchStateImpl):
    """Decays are differences of sums in float32, which may be -inf."""

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> None:
        if not inputs.is_constant:
            sums = inputs.log_decay.cumsum(0)
            decay = torch.cat([sums[:1], sums.diff(dim=0)])
            inputs = inputs._replace(log_decay=decay.clamp(max=0))
        super().step(inputs, cache, metadata, output)


class _FusedNorm(TorchStateImpl):
    """One launch whose output gate is on the other side of the norm."""

    def plan_fused_step(
        self, inputs: FusedInputs, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
    ) -> Any:
        def run(
            impl: attnlib.StateImpl,
            inputs: FusedInputs,
            cache: StateCache,
            metadata: StateMetadata,
            output: torch.Tensor,
        ) -> None:
            self.fused(impl, inputs, cache, metadata, output.flatten(1))

        return run

    def fused(
        self, impl: Any, inputs: FusedInputs, cache: StateCache, metadata: StateMetadata,
        output: torch.Tensor,
    ) -> None:  # fmt: skip
        form = dataclasses.replace(inputs.form, gate_first=not inputs.form.gate_first)
        separate_step(impl.owner, inputs._replace(form=form), cache, metadata, output)


class _FusedWithoutWindow(_FusedNorm):
    """One launch that computes the convolution and does not keep its inputs."""

    def fused(
        self, impl: Any, inputs: FusedInputs, cache: StateCache, metadata: StateMetadata,
        output: torch.Tensor,
    ) -> None:  # fmt: skip
        before = cache.tensors.window.clone()
        separate_step(impl.owner, inputs, cache, metadata, output)
        if metadata.max_query_len <= impl.spec.max_rollback + 1:
            cache.tensors.window.copy_(before)


WRONG_STATES = {
    "fused gate on the other side": (_backend(_FusedNorm, "tail", True), "ST15"),
    "fused step without its window": (_backend(_FusedWithoutWindow, "tail", True), "ST17"),
    "reads fresh slots": (_backend(_ReadsFreshSlot), "ST1"),
    "rollback off by one": (_backend(_RollbackOffByOne, "snapshots"), "ST4"),
    "window not rolled back": (_backend(_WindowNotRolledBack, "tail"), "ST5"),
    "window from the step only": (_backend(_WindowFromStepOnly), "ST5"),
    "window of outputs": (_backend(_WindowOfOutputs), "ST5"),
    "bias after activation": (_backend(_BiasAfterActivation), "ST5"),
    "transposed between phases": (_backend(_TransposedBetweenPhases), "ST8"),
    "padding writes the last slot": (_backend(_PaddingWritesLastSlot), "ST6"),
    "empty request resets": (_backend(_EmptyRequestResets), "ST6"),
    "interleaved heads of states": (_backend(_InterleavedHeads), "ST1"),
    "delta before decay": (_backend(_DeltaBeforeDecay), "ST1"),
    "beta of the value only": (_backend(_BetaOfValueOnly), "ST1"),
    "output before update": (_backend(_OutputBeforeUpdate), "ST1"),
    "logarithm to the base 2": (_backend(_FactorOfTwo), "ST1"),
    "decay as a factor": (_backend(_DecayIsAFactor), "ST1"),
    "scale before norm": (_backend(_ScaleBeforeNorm), "ST1"),
    "norm without epsilon": (_backend(_NormWithoutEpsilon), "ST7"),
    "scaled skip": (_backend(_ScaledSkip), "ST1"),
    "decays from their sums": (_backend(_DecaysFromSums), "ST7"),
    "factored channel decay": (_backend(_FactoredChannelDecay), "ST7"),
    "rounded between steps": (_backend(_RoundedBetweenSteps), "ST14"),
    "chunks from the start of a step": (_backend(_ChunksFromStepStart, "tail", True), "ST9"),
    "source written": (_backend(_SourceWritten), "ST16"),
    "fork without its tail": (_backend(_ForkWithoutTail, "tail"), "ST8"),
    "fork with its own window": (_backend(_ForkWithOwnWindow), "ST8"),
    "drafts stay in the tail": (_backend(_DraftsStayInTheTail, "tail"), "ST4"),
    "drafts are folded": (_backend(_FoldsDrafts, "tail"), "ST4"),
    "low position not moved": (_backend(_LowNotMoved, "tail"), "ST10"),
    "rows past the batch of states": (_backend(_RowsPastTheBatch), "ST3"),
    "NaN in all requests": (_backend(_NanInAllRequests), "ST11"),
    "dense inputs of states": (_backend(_DenseSlots), "ST12"),
    "wrapper reads fresh slots": (_backend(_FlaReadsFreshSlots), "ST1"),
    "wrapper keeps its own order": (_backend(_FlaOrderInSlots), "ST8"),
    "chunks of a prefill only": (_backend(_TransposedBetweenPhases, "snapshots"), "ST2"),
}
"""Error -> (backend, the check meant to detect it)."""

RIGHT_STATES["plain, through a wrapper"] = _backend(_FlaWrapper)
RIGHT_STATES["plain, in a loop"] = _backend(_Loop)
