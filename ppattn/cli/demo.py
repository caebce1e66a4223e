"""Write a folder with a page that classifies pictures in the browser and shows attention maps."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ppattn.errors import UserError


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="run folder or checkpoint file")
    parser.add_argument("--model", metavar="NAME", help="name of a model with weights")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="the folder to write")
    text = "npm package onnxruntime-web, packed or installed (default: downloaded)"
    parser.add_argument("--runtime", metavar="FILE|DIR", help=text)


def run(args: Namespace) -> None:
    if bool(args.run) == bool(args.model):
        raise UserError("Say what the page classifies with: --run DIR or --model NAME.")
    import ppattn

    ppattn.setup(device="cpu", seed=0)
    from ppattn.deploy.demo import write_demo

    _, model, classes, preprocess = ppattn.load_run(args.run or args.model)
    title = Path(args.run).resolve().name if args.run else args.model
    write_demo(model, args.output, preprocess=preprocess, classes=classes, title=title, runtime=args.runtime)
    print(f"written to {args.output}; look at it: python -m http.server --directory {args.output}")
