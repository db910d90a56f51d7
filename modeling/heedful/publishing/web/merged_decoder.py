"""The first and the later steps of an ONNX decoder in one file, as transformers.js wants them.

It calls the decoder of every step with the same inputs, and at the first one with an empty past.
"""

from pathlib import Path
from typing import Any

PAST = "past_key_values.0.decoder.key"


def merge_decoders(first: Path, following: Path, merged: Path) -> None:
    """Write one file of two decoders: `first` computes where the past is empty, `following` beside a filled one.

    Weights that both have are in it once. Inputs are those of both files; outputs are those of `first`, of which a
    later step gives keys and values of the source as it got them.
    """
    import onnx
    from onnx import helper

    models = [onnx.load(path) for path in (following, first)]
    graphs = [model.graph for model in models]
    inputs: dict[str, Any] = {value.name: value for graph in graphs for value in graph.input}  # `first` has the wider
    for name, value in inputs.items():
        if ".encoder." in name:  # empty at the first step, whatever the source's length
            value.type.tensor_type.shape.dim[2].dim_param = "past_encoder_sequence_length"
    outputs = {value.name: value for value in graphs[1].output}
    weights: dict[bytes, Any] = {}
    branches = []
    for name, graph in zip(("following", "first"), graphs, strict=True):
        nodes = _renamed_nodes(graph, name, weights, inputs)
        made = {value.name for value in graph.output}
        nodes += [
            helper.make_node("Identity", [output.replace("present", "past_key_values")], [f"{name}.{output}"])
            for output in outputs
            if output not in made
        ]
        values = [helper.make_value_info(f"{name}.{one}", value.type) for one, value in outputs.items()]
        branches.append(helper.make_graph(nodes, name, [], values))
    nodes = [
        helper.make_node("Shape", [PAST], ["past_length"], start=2, end=3),
        helper.make_node("Cast", ["past_length"], ["has_past"], to=onnx.TensorProto.BOOL),
        helper.make_node("If", ["has_past"], list(outputs), then_branch=branches[0], else_branch=branches[1]),
    ]
    whole = helper.make_graph(nodes, "decoder", list(inputs.values()), list(outputs.values()), list(weights.values()))
    opsets = {(each.domain, each.version): each for model in models for each in model.opset_import}
    result = helper.make_model(whole, opset_imports=list(opsets.values()), ir_version=models[0].ir_version)
    onnx.checker.check_model(result)
    onnx.save(result, merged)


def _renamed_nodes(graph: Any, branch: str, weights: dict[bytes, Any], inputs: dict[str, Any]) -> list[Any]:
    """Return the nodes of a graph with names of their own, and add its weights to those by their contents."""
    names = {name: name for name in (*inputs, "")}
    for weight in graph.initializer:
        name, weight.name = weight.name, ""
        known = weights.setdefault(weight.SerializeToString(), weight)
        known.name = known.name or f"weight_{len(weights)}"
        names[name] = known.name
    for node in graph.node:
        node.name = f"{branch}.{node.name}"
        node.input[:] = [names.get(name, f"{branch}.{name}") for name in node.input]
        node.output[:] = [f"{branch}.{name}" if name else "" for name in node.output]
    return list(graph.node)
