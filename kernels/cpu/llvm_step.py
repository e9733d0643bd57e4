"""Application of a plan, as `penstock.kernels.step.reference` does it in numpy."""

from llvmlite import ir

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.emitter import Kernel
from penstock.kernels.cpu.llvm_sampling import emit_sample_rows
from penstock.kernels.cpu.types import PLAN
from penstock.kernels.cpu.values import Pointer, Value
from penstock.kernels.layouts.step import APPENDED, PARAMETERS, ROW, StepBuffers

# buffers of int64; the others are int32
LONGS = {"input_ids", "positions", "slot_mapping", "slots", "last_tokens", "next_positions"}


def build_step(target: Target) -> ir.Module:
    """Return the functions `apply_plan` and `sample`."""
    module = ir.Module("step")
    emit_sample_rows(module, target)
    k = Kernel(module, "apply_plan", "i64", public=True)
    (fields,) = k.arguments
    _Plan(k, fields).emit()
    k.end()
    return module


class _Plan:
    """The function `apply_plan`; its record is as `penstock.kernels.step.apply_plan` describes."""

    def __init__(self, k: Kernel, fields: Pointer) -> None:
        self.k, self._fields = k, fields
        self.record = self._at("record", "i32")
        self.block_size, self.max_blocks = self._size("block_size"), self._size("max_blocks")
        self.tables = self._at("slot_block_tables", "i32")
        self.last_token = self._at("slot_last_token", "i64")
        self.out = {
            name: self._at(name, "i64" if name in LONGS else "i32") for name in StepBuffers._fields
        }

    def _size(self, name: str) -> Value:
        return self._fields[PLAN.index(name)]

    def _at(self, name: str, kind: str) -> Pointer:
        return self._fields.pointer(PLAN.index(name), kind)

    def emit(self) -> None:
        k, record = self.k, self.record
        with k.range(0, record[1]) as index:
            entry = record + (record[4] + index * APPENDED)
            self.tables[entry[0] * self.max_blocks + entry[1]] = entry[2]
        with k.range(0, record[2]) as index:
            self._set_parameters(record + (record[5] + index * PARAMETERS))
        num_tokens, num_keys = k.variable(k.integer(0)), k.variable(k.integer(0))
        num_tiles = k.variable(k.integer(0))
        with k.range(0, record[0]) as index:
            row = record + (record[3] + index * ROW)
            length = row[1] + row[2]
            self._tokens(row)
            self._row(index, row, length)
            num_tokens.value = num_tokens.value + row[2]
            num_keys.value = num_keys.value + length
            with k.when(row[4] >= 0):
                self._tiles(index, row[2], num_tiles.value)
                num_tiles.value = num_tiles.value + self._num_tiles(row[2])
        self._pad(record[0], num_tokens.value, num_keys.value, num_tiles.value)

    def _set_parameters(self, entry: Pointer) -> None:
        slot = entry[0]
        for index, name in enumerate(("temperature", "top_k", "top_p", "min_p"), 1):
            self._at(f"slot_{name}", "i32")[slot] = entry[index]  # the bits of fractions
        seeds = self._at("slot_seeds", "i32")
        seeds[slot * 2], seeds[slot * 2 + 1] = entry[5], entry[6]  # little-endian

    def _tokens(self, row: Pointer) -> None:
        k, out = self.k, self.out
        slot, start, count, first, token_index = (row[index] for index in range(5))
        table = self.tables + slot * self.max_blocks
        source = (token_index < 0).choose(-2 - token_index, token_index) + self.record[6]
        follows = token_index.compare("==", -1)
        with k.range(0, count) as token:
            position, at = start + token, first + token
            out["positions"][at] = position
            block = table[position // self.block_size]
            out["slot_mapping"][at] = block * self.block_size + position % self.block_size
            token_id = self.record[follows.choose(k.integer(0), source + token)]
            out["input_ids"][at] = follows.choose(self.last_token[slot], token_id)

    def _row(self, index: Value, row: Pointer, length: Value) -> None:
        k, out = self.k, self.out
        out["context_lens"][index] = out["next_positions"][index] = length
        out["decode_lens"][index] = (row[4] < 0).choose(length, 0)
        out["cu_seqlens_q"][index], out["cu_seqlens_k"][index] = row[3], row[5]
        out["slots"][index] = row[6]
        out["last_tokens"][index] = row[3] + row[2] - 1
        source = self.tables + row[0] * self.max_blocks
        to = out["block_tables"] + index * self.max_blocks
        with k.range(0, self.max_blocks) as column:
            to[column] = source[column]

    def _pad(self, rows: Value, tokens: Value, keys: Value, tiles: Value) -> None:
        """Fill rows, tokens and tiles after the record's, up to the shape's."""
        k, out = self.k, self.out
        num_rows, num_tokens = self._size("num_rows"), self._size("num_tokens")
        minus_one, zero = k.integer(-1), k.integer(0)
        with k.range(rows, num_rows) as row:
            for name in ("context_lens", "decode_lens", "next_positions"):
                out[name][row] = zero
            out["slots"][row] = minus_one
            token = k.smaller(tokens + (row - rows), num_tokens)
            out["cu_seqlens_q"][row], out["cu_seqlens_k"][row] = token, keys
            out["last_tokens"][row] = k.smaller(token, num_tokens - 1)
        out["cu_seqlens_q"][num_rows] = k.smaller(tokens + (num_rows - rows), num_tokens)
        out["cu_seqlens_k"][num_rows] = keys
        with k.range(tokens, num_tokens) as token:
            out["input_ids"][token] = out["positions"][token] = zero
            out["slot_mapping"][token] = minus_one
        with k.range(tiles * 2, self._size("num_tiles") * 2) as at:
            out["tiles"][at] = minus_one

    def _num_tiles(self, count: Value) -> Value:
        size = self._size("tile_size")
        return (count + size - 1) // size

    def _tiles(self, index: Value, count: Value, before: Value) -> None:
        """Store the tiles of a chunk; tiles with most keys come first."""
        number, size = self._num_tiles(count), self._size("tile_size")
        with self.k.range(0, number) as tile:
            place = self.out["tiles"] + (before + tile) * 2
            place[0], place[1] = index, (number - 1 - tile) * size
