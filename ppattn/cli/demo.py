"""Write a folder with a page that classifies pictures in the browser and shows attention maps."""

from argparse import Namespace
from pathlib import Path


def run(args: Namespace) -> None:
    import ppattn

    ppattn.setup(device="cpu", seed=0)
    from ppattn.deploy.demo import write_demo

    config, model, classes, preprocess = ppattn.load_run(args.run or args.model)
    title = Path(args.run).resolve().name if args.run else args.model
    facts = {"preprocess": preprocess, "classes": classes, "title": title, "sigmoid": config.loss.name == "bce"}
    write_demo(model, args.output, **facts, runtime=args.runtime)
    print(f"written to {args.output}; look at it: python -m http.server --directory {args.output}")
