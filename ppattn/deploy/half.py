"""ONNX programs in half precision with float32 islands, strongly typed by explicit casts.

An exported float32 program says by pairs of casts which parts half precision keeps in float32: `ops.as_float32` and
`ops.as_dtype_of` leave them while it is traced within `ops.marking_float32`. So the islands are those of training, from
the same lines of code. `to_half` gives every tensor outside of them half precision; a runtime that honours the types of
a graph (TensorRT with --stronglyTyped, ONNX Runtime) computes as training does.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ISLANDS = {"BatchNormalization", "LayerNormalization", "Softmax"}  # in float32 wherever they stand
FLOAT32_INPUTS = {"Resize": (1, 2)}  # inputs whose type the operator fixes
NO_FLOATS = {"ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "NonZero"}
NO_FLOATS |= {"Shape", "Size"}
EXIT = 3  # pairs of casts in a row


def to_half(path: Path, islands: bool = True) -> None:
    """Turn the float32 program in a file into float16; its inputs and outputs stay float32.

    A node with a float32 input computes in float32, and its other inputs are cast. Constants have the type of their
    users. `islands` False: everything is float16, to compare with.
    """
    model = onnx.load(path)
    _Half(model.graph, islands).run()
    onnx.save(model, path)


class _Half:
    """One pass over the nodes of a graph, in their order."""

    def __init__(self, graph: onnx.GraphProto, islands: bool):
        self.graph, self.islands = graph, islands
        self.types = {False: TensorProto.FLOAT16, True: TensorProto.FLOAT}  # by whether a tensor is wide
        self.constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
        self.users: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.users.setdefault(name, []).append(node)
        self.nodes: list[onnx.NodeProto] = []
        self.wide: dict[str, bool] = {}  # the float tensors so far, by name: float32 or float16
        self.alias: dict[str, str] = {}
        self.stored: dict[str, np.ndarray] = {}

    def run(self) -> None:
        for one in self.graph.input:
            self.wide[one.name] = True
            self.alias[one.name] = self.typed(one.name, False)
        skipped: set[str] = set()
        for node in self.graph.node:
            if node.output[0] in skipped:
                continue
            chain = self.marks(node)
            if chain:
                skipped |= {name for link in chain for name in link.output}
                self.alias[chain[-1].output[0]] = self.typed(node.input[0], self.islands and len(chain) < 2 * EXIT)
            elif node.op_type == "Constant":
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
            else:
                self.add(node)
        for one in self.graph.output:
            self.nodes.append(helper.make_node("Identity", [self.typed(one.name, True)], [f"{one.name}.out"]))
            one.name = f"{one.name}.out"
        self.finish()

    def marks(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The casts of the mark that begins at a node: a pair, or `EXIT` pairs; none if it is another node."""
        chain: list[onnx.NodeProto] = []
        while _is_cast(node, TensorProto.DOUBLE):
            (back,) = self.users[node.output[0]]
            chain += [node, back]
            users = self.users.get(back.output[0], [])
            if len(users) != 1 or not _is_cast(users[0], TensorProto.DOUBLE):
                break
            node = users[0]
        return chain if len(chain) >= 2 * EXIT else chain[:2]

    def add(self, node: onnx.NodeProto) -> None:
        """A node in the type of its inputs, with the casts that it needs in front."""
        names = [self.alias.get(name, name) for name in node.input]
        inside, island = any(self.wide.get(name, False) for name in names), self.islands and node.op_type in ISLANDS
        wide = inside or island
        fixed = FLOAT32_INPUTS.get(node.op_type, ())
        own = [getattr(self.constants.get(name), "dtype", None) for name in names]
        floats = [i for i, name in enumerate(names) if name in self.wide or own[i] == np.float32]
        names = [self.typed(name, wide or i in fixed) if i in floats else name for i, name in enumerate(names)]
        new = helper.make_node(node.op_type, names, list(node.output), name=node.name, domain=node.domain)
        for attribute in node.attribute:
            new.attribute.append(attribute)
            copy = new.attribute[-1]
            if node.op_type == "Cast" and copy.i == TensorProto.FLOAT:
                copy.i = self.types[wide]
            if copy.HasField("t") and copy.t.data_type == TensorProto.FLOAT and not wide:
                copy.t.CopyFrom(numpy_helper.from_array(half(numpy_helper.to_array(copy.t)), copy.t.name))
        self.nodes.append(new)
        made = floats or any(a.name == "to" and a.i in self.types.values() or a.HasField("t") for a in new.attribute)
        to_other = node.op_type == "Cast" and new.attribute[0].i not in self.types.values()
        if made and node.op_type not in NO_FLOATS and not to_other:
            self.wide |= dict.fromkeys(node.output, wide)
        if island and not inside:
            self.alias |= {name: self.typed(name, False) for name in node.output}

    def typed(self, name: str, wide: bool) -> str:
        """A tensor as float32 or float16: itself, a constant in that type, or a cast."""
        name = self.alias.get(name, name)
        if name in self.constants:
            own = name if wide else f"{name}.half"
            self.stored[own] = self.constants[name] if wide else half(self.constants[name])
            return own
        if self.wide[name] == wide:
            return name
        cast = f"{name}.{'wide' if wide else 'half'}"
        if cast not in self.wide:
            self.nodes.append(helper.make_node("Cast", [name], [cast], to=self.types[wide]))
            self.wide[cast] = wide
        return cast

    def finish(self) -> None:
        """Put nodes and constants into the graph."""
        used = {name for node in self.nodes for name in node.input}
        others = {name: array for name, array in self.constants.items() if array.dtype != np.float32}
        for field in (self.graph.node, self.graph.initializer, self.graph.value_info):
            del field[:]
        self.graph.node.extend(self.nodes)
        stored = [(name, array) for name, array in (others | self.stored).items() if name in used]
        self.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored)


def _is_cast(node: onnx.NodeProto, to: int) -> bool:
    return node.op_type == "Cast" and node.attribute[0].i == to


def half(array: np.ndarray) -> np.ndarray:
    """float16; numbers beyond its range become the largest."""
    limit = np.finfo(np.float16).max
    return np.clip(array, -limit, limit).astype(np.float16)
