"""Convert weights of the authors, timm, transformers or PaddleClas to a weights file of this project, or to timm's."""

from argparse import Namespace
from pathlib import Path

from ppattn.cli import options
from ppattn.errors import UserError
from ppattn.text import progress_line


def run(args: Namespace) -> None:
    import ppattn
    from ppattn import weights, zoo
    from ppattn.weights.beside import settings_beside_weights
    from ppattn.weights.checkpoint import weight_shards

    ppattn.setup(device="cpu", seed=0)
    output = Path(args.output if args.output.endswith(".safetensors") else f"{args.output}.safetensors")
    if args.to and ({args.model, args.part, args.attention, args.num_classes} != {None} or args.allow or args.img_size):
        raise UserError("--to takes --from and --output only: a run or model as it is.")
    if args.to:
        options.check_output(str(output), [args.source], "")
        _, model, _, preprocess = ppattn.load_run(args.source)
        arrays, facts = weights.to_timm(model)
        weights.save(output, arrays, None)
        settings = "".join(f"{key}={value!r}, " for key, value in facts.items())
        settings += f"norm_layer=functools.partial(torch.nn.LayerNorm, eps={model.norm.epsilon})"
        print(f"timm.models.VisionTransformer({settings})")
        print(f"takes it with load_state_dict(safetensors.torch.load_file({str(output)!r}))")
        print(f"pixels: mean {preprocess.mean}, std {preprocess.std}; written to {output}")
        return
    if not args.model:
        raise UserError("Name the model that the weights belong to: --model NAME.")
    name = zoo.model_entry(args.model).name
    source = weights.find(args.source)
    options.check_output(str(output), [source, *weight_shards(source)], ".safetensors")
    size = args.img_size and (args.img_size[0] if len(args.img_size) == 1 else args.img_size)
    given = {"num_classes": args.num_classes, "attention": args.attention, "img_size": size}
    arguments = {key: value for key, value in given.items() if value is not None}
    with progress_line("convert", 3) as begin:
        begin(f"building {name}")
        model = ppattn.create_model(name, **arguments)
        begin(f"reading {args.source}")
        report = weights.convert(model, source, args.allow, args.part)
        arguments |= {"name": name, "img_size": list(model.img_size), **report.constants}
        arguments.pop("num_classes", None)  # the tensors tell
        heads = model.blocks_flat()[0].attn.num_heads
        pixels, classes, known = settings_beside_weights(source.parent, model.num_classes, heads)
        found = {"classes": classes} if classes else {}
        begin(f"writing {output}")
        untrained = [text.partition(" ")[0] for text in report.missing]
        metadata = {"config": {"model": arguments, "data": pixels}, "untrained": untrained, **found}
        weights.save(output, model.state_dict(), metadata)
    print("\n".join([str(report), *known]))
    print(f"written to {output}")
