"""Images to batches: sources, transforms, mixing and loading. Nothing here imports Paddle."""

from ppattn.data.images import IMAGENET_MEAN, IMAGENET_STD, ImageError, Preprocess, decode, read_image
from ppattn.data.loader import EvalLoader, TrainLoader
from ppattn.data.mix import mix, mix_draw, smooth_targets
from ppattn.data.sources import build_datasets
from ppattn.data.splits import Splits
from ppattn.data.transforms import TrainTransform
