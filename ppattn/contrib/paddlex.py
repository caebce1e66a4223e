"""`import ppattn.contrib.paddlex` lets PaddleX (3.7.2) open exported folders under the names of the zoo.

paddlex.create_model("inline_deit_nano", model_dir="exported").predict("photo.jpg")
"""

from paddlex.inference.models.bindings import register_predictor_binding_map
from paddlex.inference.models.image_classification import ClasPredictor

from ppattn.zoo import list_backbones, list_models

NAMES = sorted({*list_models(), *list_backbones()})
register_predictor_binding_map(ClasPredictor, {"paddle_static": NAMES, "onnxruntime": NAMES})
