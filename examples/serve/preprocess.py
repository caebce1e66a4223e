import numpy as np
from PIL import Image, ImageOps


def preprocess(image, img_size, mean, std, crop_ratio, crop_keep_aspect, interpolation, in_chans, max_value=None):
    """PIL image -> float32 [1, 3, H, W]; the settings are those of "preprocess" in ppattn.json."""
    if in_chans != 3 or max_value:
        raise ValueError("this example prepares pictures of three channels, without max_value.")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("RGB")
    height, width = (int(side / crop_ratio) for side in img_size)
    if crop_keep_aspect:
        scale = max(height / image.height, width / image.width)
        height, width = round(image.height * scale), round(image.width * scale)
    filters = {"nearest": "NEAREST", "area": "BOX", "bilinear": "BILINEAR", "bicubic": "BICUBIC"}
    resampling = Image.Resampling[filters[interpolation]]
    top, left = (height - img_size[0]) // 2, (width - img_size[1]) // 2
    box = np.array([left, top, left + img_size[1], top + img_size[0]])
    if height * width <= 1 << 24:
        image = image.resize((width, height), resampling).crop(tuple(box))
    else:  # of a very long picture, only what is kept
        shrunk = np.tile([image.width / width, image.height / height], 2)
        image = image.resize(img_size[::-1], resampling, tuple(box * shrunk))
    return ((np.asarray(image, np.float32) / 255 - np.float32(mean)) / np.float32(std)).transpose(2, 0, 1)[None]
