"""Gated DeltaNet for one sequence and one key head: see `penstock.kernels.recurrent.delta_rule`.

Each token is computed by the recurrent form, also in prompts. The bits of a token thus depend
neither on the chunk, the batch and drafts, nor on whether it is computed again. The columns of a
state do not depend on one another: a block of them stays in the first-level cache for some tokens.
"""

from llvmlite import ir

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.llvm_elementwise import add_lanes, exp, inverse_rms, log, silu
from penstock.kernels.cpu.types import STATE, TOKENS, DeltaShape
from penstock.kernels.cpu.values import Kernel, Pointer, Value, emitted
from penstock.kernels.recurrent.delta_rule import MAX_SOFTPLUS, NORM_EPS

UNROLLED = 4  # rows of a state per iteration
BLOCK = 32  # most columns of a block

ARGUMENTS = (
    *(f"f32 {name}" for name in ("qkvz", "gates", "out")),  # from the sequence's first token
    *(f"f32 {name}" for name in ("conv", "a_log", "dt_bias", "norm", "eps")),
    *(f"f32 {name}" for name in (*STATE, "scratch")),
    *(f"int {name}" for name in ("block_stride", "read", "written", "num_window", "number")),
    *(f"int {name}" for name in ("decodes", "head")),
)


def delta_kernel(module: ir.Module, target: Target, shape: DeltaShape) -> Kernel:
    """Emit the function with ARGUMENTS.

    It writes the gated norm of the outputs, and the state block. read: -1 for a state of zeros.
    written: -1 for none. decodes: 1 if the block gets the state before the tokens, and them as
    its window.
    """
    kinds = " ".join(argument.split()[0] for argument in ARGUMENTS)
    return emitted(module, "delta", kinds, lambda k: _Delta(k, target, shape).emit())


class _Delta:
    head: Value
    out: Pointer
    state: Pointer  # [group, blocks of columns, key_dim, width]
    v: Pointer  # [group, TOKENS, value_dim]
    numbers: Pointer  # [group, TOKENS, 2]: beta and decay

    def __init__(self, k: Kernel, target: Target, s: DeltaShape) -> None:
        self.k, self.target, self.s = k, target, s
        (self.qkvz, self.gates, self.out, self.conv, self.a_log, self.dt_bias, self.gain, self.eps,
         self.recurrent, self.inputs, self.window_inputs, self.window_gates, scratch,
         stride, self.read, self.written, self.num_window, self.number, decodes, self.head
        ) = k.arguments  # fmt: skip
        self.read_at, self.written_at = self.read * stride, self.written * stride
        self.lanes = target.lanes
        self.width = max(size for size in (16, BLOCK) if s.value_dim % size == 0)
        self.total = self.num_window + self.number
        self.decodes = (decodes > 0) & (self.written >= 0)
        # tokens after which the state is written
        kept = (decodes > 0).choose(self.num_window, self.total)
        self.kept = (self.written < 0).choose(k.integer(-1), kept)
        self.state = scratch
        self.q = self.state + s.group * s.key_dim * s.value_dim
        self.key = self.q + TOKENS * s.key_dim
        self.overlap = self.key + TOKENS * s.key_dim  # of query and key
        self.v = self.overlap + TOKENS
        self.numbers = self.v + TOKENS * s.group * s.value_dim

    def emit(self) -> None:
        k, s = self.k, self.s
        self._move_states(is_loaded=True)
        with k.range(0, self.total, TOKENS) as first:
            last = k.smaller(first + TOKENS, self.total)
            with k.range(first, last) as token:
                self._prepare(token, token - first)
            with k.range(0, s.group) as member:
                with k.range(0, s.value_dim, self.width) as column, k.range(first, last) as token:
                    with k.when(token.compare("==", self.kept)):
                        self._move(member, column, is_loaded=False)
                    self._apply(member, column, token, token - first)
                with k.range(first, last) as token, k.when(token >= self.num_window):
                    self._norm(member, token - self.num_window)
        with k.when(self.total.compare("==", self.kept)):
            self._move_states(is_loaded=False)
        with k.when(self.written >= 0):
            self._store_inputs()

    def _value_head(self, member: Value) -> Value:
        return self.head * self.s.group + member

    def _block(self, member: Value, column: Value) -> Pointer:
        return self.state + (member * self.s.value_dim + column) * self.s.key_dim

    def _move_states(self, is_loaded: bool) -> None:
        k, s = self.k, self.s
        with k.range(0, s.group) as member, k.range(0, s.value_dim, self.width) as column:
            self._move(member, column, is_loaded)

    def _move(self, member: Value, column: Value, is_loaded: bool) -> None:
        """Load a block of columns from the block that is read, or store it."""
        k, s, own = self.k, self.s, self._block(member, column)
        place = self._value_head(member) * (s.key_dim * s.value_dim) + column
        place = place + (self.read_at if is_loaded else self.written_at)
        with k.range(0, s.key_dim) as row:
            for at in range(0, self.width, self.lanes):
                here, there = own + (row * self.width + at), row * s.value_dim + place + at
                if is_loaded:
                    with k.when(self.read >= 0):
                        here[0] = self.recurrent.vector(there, self.lanes)
                    with k.when(self.read < 0):
                        here[0] = k.zeros(self.lanes)
                else:
                    self.recurrent[there] = here.vector(0, self.lanes)

    def _prepare(self, token: Value, place: Value) -> None:
        """Compute queries, keys, values and gates of a token."""
        k, s = self.k, self.s
        taps = [self._input(token + tap) for tap in range(s.kernel)]
        q, key = self.q + place * s.key_dim, self.key + place * s.key_dim
        for number, part in enumerate((q, key)):
            first = (self.head + number * s.key_heads) * s.key_dim
            self._convolve(taps, first, s.key_dim, part)
        scale = self._inverse_norm(q) * s.key_dim**-0.5, self._inverse_norm(key)
        for part, factor in zip((q, key), scale, strict=True):
            with k.range(0, s.key_dim, self.lanes) as at:
                part[at] = part.vector(at, self.lanes) * factor
        self.overlap[place] = self._dot(q, key)
        with k.range(0, s.group) as member:
            first = self._value_head(member) * s.value_dim + 2 * s.key_heads * s.key_dim
            self._convolve(taps, first, s.value_dim, self._v(member, place))
            self._gate(member, token, self._numbers(member, place))

    def _v(self, member: Value, place: Value) -> Pointer:
        return self.v + (member * TOKENS + place) * self.s.value_dim

    def _numbers(self, member: Value, place: Value) -> Pointer:
        return self.numbers + (member * TOKENS + place) * 2

    def _input(self, index: Value) -> tuple[Pointer, Value]:
        """Return inputs of the convolution, and True if they are zeros.

        index: 0 for the oldest inputs before the window, which its tokens follow, then the step's.
        """
        k, s, b = self.k, self.s, self.k.builder
        before = s.kernel - 1
        old = self.inputs + (self.read_at + index * s.channels)
        of_window = self.window_inputs + (self.read_at + (index - before) * s.channels)
        new = self.qkvz + (index - before - self.num_window) * s.width
        is_old, is_zero = index < before, (index < before) & (self.read < 0)
        raw = b.select((index < self.num_window + before).raw, of_window.raw, new.raw)
        raw = b.select(is_zero.raw, self.qkvz.raw, b.select(is_old.raw, old.raw, raw))
        return Pointer(k.builder, raw, "f32"), is_zero

    def _convolve(
        self, taps: list[tuple[Pointer, Value]], first: Value, size: int, to: Pointer
    ) -> None:
        """Write SiLU of the convolution of `size` channels."""
        k = self.k
        with k.range(0, size, self.lanes) as at:
            total = k.zeros(self.lanes)
            for number, (inputs, is_zero) in enumerate(taps):
                weight = (self.conv + number * self.s.channels).vector(first + at, self.lanes)
                values = inputs.vector(first + at, self.lanes)
                total = weight.fma(is_zero.choose(k.zeros(self.lanes), values), total)
            to[at] = silu(total)

    def _dot(self, x: Pointer, y: Pointer) -> Value:
        k = self.k
        total = k.variable(k.zeros(self.lanes))
        with k.range(0, self.s.key_dim, self.lanes) as at:
            total.value = x.vector(at, self.lanes).fma(y.vector(at, self.lanes), total.value)
        return add_lanes([total.value], self.lanes).lane(0)

    def _inverse_norm(self, x: Pointer) -> Value:
        return 1.0 / (self._dot(x, x) + NORM_EPS).intrinsic("sqrt")

    def _gate(self, member: Value, token: Value, numbers: Pointer) -> None:
        """Write beta and decay of a token."""
        k, s, head = self.k, self.s, self._value_head(member)
        with k.when(token < self.num_window):
            place = self.read_at + (head * s.window + token) * 2
            numbers[0], numbers[1] = self.window_gates[place], self.window_gates[place + 1]
        with k.when(token >= self.num_window):
            at = (token - self.num_window) * (2 * s.value_heads) + head
            numbers[0] = 1.0 / (exp(0.0 - self.gates[at]) + 1.0)
            a = self.gates[at + s.value_heads] + self.dt_bias[head]
            numbers[1] = (0.0 - exp(self.a_log[head])) * _softplus(a)
            with k.when(self.decodes):
                place = self.written_at + (head * s.window + token - self.num_window) * 2
                self.window_gates[place], self.window_gates[place + 1] = numbers[0], numbers[1]
        numbers[1] = exp(numbers[1])

    def _apply(self, member: Value, column: Value, token: Value, place: Value) -> None:
        """Compute a token's output in a block of columns, and add the token to the block."""
        k, s, lanes = self.k, self.s, self.lanes
        block, numbers = self._block(member, column), self._numbers(member, place)
        q, key = self.q + place * s.key_dim, self.key + place * s.key_dim
        beta, decay, overlap = numbers[0], numbers[1], self.overlap[place]
        vectors = range(0, self.width, lanes)
        found, answers = ([k.variable(k.zeros(lanes)) for _ in vectors] for _ in range(2))
        with k.range(0, s.key_dim, UNROLLED) as first:
            for row in (first + index for index in range(UNROLLED)):
                for at, of_key, of_query in zip(vectors, found, answers, strict=True):
                    values = block.vector(row * self.width + at, lanes)
                    of_key.value = key[row].fma(values, of_key.value)
                    of_query.value = q[row].fma(values, of_query.value)
        v = self._v(member, place) + column
        added = [
            (v.vector(at, lanes) - of_key.value * decay) * beta
            for at, of_key in zip(vectors, found, strict=True)
        ]
        with k.when(token >= self.num_window):
            out = self._out(member, token - self.num_window) + column
            for at, own, answer in zip(vectors, added, answers, strict=True):
                out[at] = overlap.fma(own, answer.value * decay)
        # nothing reads the state after the last token of a decoding sequence
        is_last = (token + 1).compare("==", self.total) & self.kept.compare("!=", self.total)
        with k.when(is_last.compare("==", 0)), k.range(0, s.key_dim, UNROLLED) as first:
            for row in (first + index for index in range(UNROLLED)):
                for at, own in zip(vectors, added, strict=True):
                    where = row * self.width + at
                    block[where] = key[row].fma(own, block.vector(where, lanes) * decay)

    def _out(self, member: Value, token: Value) -> Pointer:
        head = token * self.s.value_heads + self._value_head(member)
        return self.out + head * self.s.value_dim

    def _norm(self, member: Value, token: Value) -> None:
        """Replace a token's output by its gated norm."""
        k, s, lanes, out = self.k, self.s, self.lanes, self._out(member, token)
        factor = inverse_rms(k, self.target, out, k.integer(s.value_dim), self.eps[0])
        z = self.qkvz + (token * s.width + self._value_head(member) * s.value_dim + s.channels)
        with k.range(0, s.value_dim, lanes) as at:
            normed = out.vector(at, lanes) * factor * self.gain.vector(at, lanes)
            out[at] = normed * silu(z.vector(at, lanes))

    def _store_inputs(self) -> None:
        """Store the inputs before the written state's position, and those of the window."""
        k, s, lanes = self.k, self.s, self.lanes
        of_keys, of_values = s.key_heads * s.key_dim, s.group * s.value_dim
        parts = (
            (self.head * s.key_dim, s.key_dim),
            (self.head * s.key_dim + of_keys, s.key_dim),
            (self.head * of_values + 2 * of_keys, of_values),
        )
        for first, size in parts:
            with k.range(0, s.kernel - 1) as index:
                source, is_zero = self._input(self.kept + index)
                to = self.inputs + (self.written_at + index * s.channels)
                with k.range(first, first + size, lanes) as at:
                    to[at] = is_zero.choose(k.zeros(lanes), source.vector(at, lanes))
            with k.when(self.decodes), k.range(0, self.number) as index:
                to = self.window_inputs + (self.written_at + index * s.channels)
                source = self.qkvz + index * s.width
                with k.range(first, first + size, lanes) as at:
                    to[at] = source.vector(at, lanes)


def _softplus(x: Value) -> Value:
    """Return log(1 + exp(x))."""
    power = exp(x)
    total = power + 1.0
    rest = total - 1.0  # exact; its difference from `power` is the rounding error of `total`
    is_large = rest.compare("!=", 0.0)
    found = is_large.choose(log(total) * (power / is_large.choose(rest, 1.0)), power)
    return (x > MAX_SOFTPLUS).choose(x, found)
