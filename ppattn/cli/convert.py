"""`convert`: the authors' published weights as a weights file of ours."""

from __future__ import annotations

from pathlib import Path

HELP = "Convert official weights; needs no PyTorch and runs no code from the file."


def add_arguments(parser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME", help="zoo entry, see `list models`")
    parser.add_argument("--from", required=True, dest="source", metavar="FILE", help=".pth, .safetensors or .npz")
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="ours; .safetensors is added where it is missing"
    )
    parser.add_argument(
        "--allow", nargs="+", default=[], metavar="NAME", help="what may differ: head, or patterns of names"
    )
    parser.add_argument("--img-size", type=int, metavar="PIXELS", help="resize the position tables for this input size")


def run(args) -> None:
    from ppattn import weights
    from ppattn.runtime import setup
    from ppattn.zoo import create_model

    setup(device="cpu", seed=0)
    model = create_model(args.model, **({"img_size": args.img_size} if args.img_size else {}))
    arrays, _ = weights.read(args.source)
    report = weights.load_official(model, arrays, tuple(args.allow))
    report.source = args.source
    output = Path(args.output)
    output = output if output.suffix == ".safetensors" else output.with_name(f"{output.name}.safetensors")
    about = {"kind": "weights", "model": args.model, "img_size": list(model.img_size), "source": Path(args.source).name}
    weights.save(output, model.state_dict(), about)
    print(report)
    print(f"{args.model}: written to {output}")
