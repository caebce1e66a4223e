"""Reading images, and the one preprocessing of evaluation, prediction and export.

Needs numpy, OpenCV, Pillow and pydantic. Images are uint8 [height, width, 3] in RGB order throughout `ppattn.data`.
"""

import io
import os
import re
import stat
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import cv2
import numpy as np
from PIL import Image, ImageOps
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from ppattn.errors import UserError
from ppattn.validation import AboveZero, Mean, Section, Std, must, validation_error

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PILLOW_FILTERS = {"nearest": "NEAREST", "area": "BOX", "bilinear": "BILINEAR", "bicubic": "BICUBIC"}
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP", "AVIF", "JPEG2000")  # Pillow's names
SIGNATURE = re.compile(  # the beginning of a file in one of these formats
    rb"\xff\xd8\xff|\x89PNG|\x93NUMPY|GIF8|BM.{4}\0{4}|II\*\0|MM\0\*|P[4-6]\s"
    rb"|RIFF.{4}WEBP|.{4}ftypavi[fs]|\0{3}\x0cjP  |\xff\x4f\xff\x51",
    re.DOTALL,
)
JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")  # those with a segment, and the end of the image
JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of segments that hold the number of channels
LARGEST_RESIZED = 1 << 24  # pixels
TIFF_PLANES = {b"II*\0": b"\x1c\x01\x03\0\x01\0\0\0\x02\0", b"MM\0*": b"\x01\x1c\0\x03\0\0\0\x01\0\x02"}  # tag 284


class ImageError(UserError):
    """A file that is missing, empty, truncated or not an image; the message names it."""


def decode(data: bytes, name: str, max_value: float | None = None, channels: int = 3) -> np.ndarray:
    """Encoded bytes to uint8 [h, w, channels]; RGB is what Pillow's `convert("RGB")` gives, whatever the format.

    Grey is repeated, alpha dropped, of 16 bits the upper 8 are kept, EXIF orientation is applied. OpenCV reads JPEG and
    PNG, to the same pixels in less time. More than three channels are those of the file, in their order, or its pages;
    NumPy's files (.npy) hold [h, w], [h, w, channels] or [channels, h, w]. `max_value` becomes 255, where values have
    more than 8 bits: 4095 for 12 bits. `ImageError`: no image, other channels, an unknown range, or a JPEG that ends
    too early, which some versions of OpenCV would fill up with grey.
    """
    if not data:
        raise ImageError(f"{name} is empty.")
    jpeg = jpeg_channels(data) if data.startswith(b"\xff\xd8") else None
    if jpeg == 0:
        raise ImageError(f"{name} is a truncated JPEG.")
    try:
        if (planes := TIFF_PLANES.get(data[:4])) and planes in data and getattr(_numbers_of(data, 3), "ndim", 0) == 3:
            raise ImageError(f"{name} has planes of more than 8 bits: interleave the channels, or save it as .npy.")
        if channels > 3 or max_value or data.startswith(b"\x93NUMPY"):
            if (numbers := _numbers_of(data, channels)) is not None:
                return from_array(numbers, name, max_value, channels)
        elif jpeg in (1, 3) or data.startswith(b"\x89PNG"):
            image: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
            return cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)  # None raises
        Image.init()
        with Image.open(io.BytesIO(data), formats=[kind for kind in FORMATS if kind in Image.OPEN]) as picture:
            return image_from_pillow(picture, name, max_value, channels)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of many kinds
        problem = "not a readable image (not one at all, truncated, or of an unknown kind)"
        if "pixels" in str(error).lower():
            most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
            problem = f"too large: OpenCV takes 2^30 pixels of a JPEG or PNG, Pillow {most:,} of others; cut tiles"
        raise ImageError(f"{name} is {problem}.") from None


def _numbers_of(data: bytes, channels: int) -> np.ndarray | None:
    """The numbers in a file, [h, w] or [h, w, c], of any type; None where Pillow knows them best."""
    if data.startswith(b"\x93NUMPY"):
        array = np.load(io.BytesIO(data), allow_pickle=False)
        first = array.ndim == 3 and array.shape[0] in (1, 3, channels) and array.shape[2] not in (1, 3, channels)
        return array.transpose(1, 2, 0) if first else array
    file = np.frombuffer(data, np.uint8)
    if channels > 3 and len(pages := cv2.imdecodemulti(file, cv2.IMREAD_UNCHANGED)[1]) == channels:
        return np.stack(pages, axis=-1)
    deep: Any = cv2.imdecode(file, cv2.IMREAD_UNCHANGED if channels > 3 else cv2.IMREAD_ANYDEPTH | cv2.IMREAD_ANYCOLOR)
    if deep is not None and deep.dtype != np.uint8:  # Pillow reads 8 bits of each colour
        return deep[..., [2, 1, 0, 3][: deep.shape[2]]] if deep.ndim == 3 else deep
    return None


def from_array(array: np.ndarray, name: str, max_value: float | None = None, channels: int = 3) -> np.ndarray:
    """Numbers [h, w] or [h, w, c] of any type as uint8 [h, w, channels], see `decode`."""
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.dtype.kind not in "uif" or not array.size:
        raise ImageError(f"{name} holds {array.dtype} {list(array.shape)}, not numbers [height, width, channels].")
    if array.dtype == np.uint16 and max_value is None:
        array = (array >> 8).astype(np.uint8)
    elif array.dtype != np.uint8:
        if max_value is None:
            raise ImageError(f"{name} holds {array.dtype}, whose range is not known: set data.max_value.")
        array = np.rint(np.nan_to_num(array.astype(np.float64)) * (255 / max_value)).clip(0, 255).astype(np.uint8)
    count = array.shape[2]
    if count != channels and (channels > 3 or count > 4):
        raise ImageError(f"{name} has {count} channels, the model takes {channels}.")
    if channels <= 3:
        array = np.repeat(array[..., :1], 3, axis=2) if count < 3 else array[..., :3]
    return np.ascontiguousarray(array)


def is_one_colour(image: np.ndarray) -> bool:
    """Whether an image is nearly of one colour; of 16 bits only the lower ones may be in use."""
    return int(image.max()) - int(image.min()) < 16


def image_from_pillow(picture: Image.Image, name: str, max_value: float | None = None, channels: int = 3) -> np.ndarray:
    """A picture of Pillow as uint8 [h, w, channels], see `decode`; `ImageError` for 32 bits without `max_value`."""
    turned = ImageOps.exif_transpose(picture)
    if channels > 3 or (max_value and picture.mode not in ("CMYK", "LAB")):
        turned = turned.convert("RGB") if turned.mode in ("P", "1", "YCbCr") else turned
        return from_array(np.asarray(turned), name, max_value, channels)
    if picture.mode == "F" or (picture.mode == "I" and picture.format not in ("PNG", "PPM")):  # these have 16 bits
        raise ImageError(f"{name} holds numbers of 32 bits, whose range is not known: set data.max_value.")
    if turned.mode.startswith("I"):
        turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
    return np.array(turned.convert("RGB"))


def jpeg_channels(data: bytes) -> int:
    """Channels of a JPEG whose segments and scans lead to its end marker, else 0; what stands behind is not read."""
    at, channels = 2, 0
    while match := JPEG_MARKER.search(data, at):
        if match[1] == b"\xd9":
            return channels
        segment = data[match.end() : match.end() + 8]  # begins with its length, these two bytes included
        if match[1][0] in JPEG_FRAMES:
            channels = segment[-1] if segment else 0
        at = match.end() + int.from_bytes(segment[:2], "big")
    return 0


def read_image(path: str | Path, max_value: float | None = None, channels: int = 3) -> np.ndarray:
    """The file as uint8 [height, width, channels]; raises `ImageError` where it cannot be read, see `decode`."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ImageError(f"{path} is not an image file, but a folder, a pipe or a device.")
        data = Path(path).read_bytes()
    except OSError as error:
        raise ImageError(f"Cannot read image {path}: {error.strerror}.") from None
    return decode(data, str(path), max_value, channels)


# Numbers of numpy become Python's, and a list becomes a tuple.
PLAIN = BeforeValidator(lambda value: tuple(np.ravel(value).tolist()))
TWICE = BeforeValidator(lambda value: (value, value) if isinstance(value, int) else value)
Side = Annotated[int, Field(ge=1, le=2**14)]


class Preprocess(Section):
    """What happens to an image before the model sees it, in evaluation, prediction and export alike; plain data.

    The image is resized to `img_size / crop_ratio` (rounded down) by Pillow, as in PIL-based recipes, and its centre of
    `img_size` is cut out (an odd margin is one pixel smaller above and left). PaddleX's operators do the same.
    """

    model_config = ConfigDict(frozen=True)

    img_size: Annotated[tuple[Side, Side], PLAIN, TWICE]  # of the model's input; one number is both (TWICE runs first)
    mean: Annotated[tuple[Mean, Mean, Mean], PLAIN] = IMAGENET_MEAN  # of pixels in 0..1
    std: Annotated[tuple[Std, Std, Std], PLAIN] = IMAGENET_STD
    crop_ratio: Annotated[float, Field(ge=0.01, le=1)] = 1.0  # part that is kept of the resized image, along each side
    crop_keep_aspect: bool = False  # one factor for both sides, so that the image covers the target; else each its own
    interpolation: Literal["nearest", "area", "bilinear", "bicubic"] = "bicubic"
    in_chans: Annotated[int, Field(ge=1, le=64), must(lambda count: count != 2, "1, 3 or more")] = 3
    max_value: AboveZero | None = None  # see `decode`

    def __init__(self, *values: Any, **settings: Any):
        try:
            super().__init__(**dict(zip(type(self).model_fields, values, strict=len(values) > 8)), **settings)
        except ValidationError as error:
            raise validation_error(error, type(self), lambda key: "Preprocessing") from None

    @cached_property
    def statistics(self) -> np.ndarray:
        """[2, in_chans]: mean and standard deviation of the model's channels; grey's are averages, more begin again."""
        colours = np.array([self.mean, self.std], np.float64)
        return colours.mean(axis=1, keepdims=True) if self.in_chans == 1 else colours[:, np.arange(self.in_chans) % 3]

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """float32 [256] for each channel: the 256 levels, normalised."""
        return [((np.arange(256) / 255 - m) / s).astype(np.float32) for m, s in self.statistics.T]

    def to_dict(self) -> dict:
        """Plain numbers, strings and lists; `Preprocess(**settings)` takes it back."""
        return self.model_dump(mode="json", exclude_none=True)

    @property
    def planes(self) -> int:
        """Channels of the images before they become grey."""
        return max(3, self.in_chans)

    def read(self, path: str | Path) -> np.ndarray:
        """The file as uint8 [height, width, channels] as `pixels` takes it; see `read_image`."""
        return read_image(path, self.max_value, self.planes)

    def pixels(self, image: np.ndarray) -> np.ndarray:
        """Resize and crop: uint8 [h, w, 3] of any size to uint8 [*img_size, 3]; or of more channels."""
        array, shape = isinstance(image, np.ndarray), (self.planes,)
        if not array or image.dtype != np.uint8 or image.shape[2:] != shape or not image.size:
            kind = f"{image.dtype} {list(image.shape)}" if array else type(image).__name__
            raise UserError(f"An image is uint8 [height, width, {self.planes}], not {kind}.")
        if self.planes == 3:
            return self._resized(image)
        turns = [np.arange(start, start + 3) % self.planes for start in range(0, self.planes, 3)]  # three at a time
        parts = [self._resized(np.ascontiguousarray(image[..., three])) for three in turns]
        return np.ascontiguousarray(np.concatenate(parts, axis=2)[..., : self.planes])

    def _resized(self, image: np.ndarray) -> np.ndarray:
        height, width = (int(side / self.crop_ratio) for side in self.img_size)
        if self.crop_keep_aspect:
            scale = max(height / image.shape[0], width / image.shape[1])
            height, width = round(image.shape[0] * scale), round(image.shape[1] * scale)
        top, left = (height - self.img_size[0]) // 2, (width - self.img_size[1]) // 2
        box = np.array([left, top, left + self.img_size[1], top + self.img_size[0]])
        picture, resampling = Image.fromarray(image), Image.Resampling[PILLOW_FILTERS[self.interpolation]]
        if height * width <= LARGEST_RESIZED:
            picture = picture.resize((width, height), resampling).crop(tuple(box))
        else:  # of a very long picture, only what is kept
            shrunk = np.tile([image.shape[1] / width, image.shape[0] / height], 2)
            picture = picture.resize(self.img_size[::-1], resampling, tuple(box * shrunk))
        return np.array(picture)

    @property
    def slot(self) -> tuple[int, ...]:
        """The shape of what `pixels` makes."""
        return *self.img_size, self.planes

    def assemble(self, pixels: np.ndarray | list[np.ndarray]) -> np.ndarray:
        """What `pixels` made, uint8 [b, *slot], to float32 [b, in_chans, *img_size], (value / 255 - mean) / std."""
        height, width = self.img_size
        images = np.empty((len(pixels), self.in_chans, height, width), np.float32)
        # OpenCV writes planes of equal alignment past the cache; a byte between them makes reading them much faster.
        planes = np.empty((self.in_chans, height * width + 1), np.uint8)[:, :-1].reshape(-1, height, width)
        for image, channels in zip(pixels, images, strict=True):
            if self.in_chans >= 3:
                cv2.split(image, list(planes))
            else:
                cv2.cvtColor(image, cv2.COLOR_RGB2GRAY, dst=planes[0])
            for plane, table, channel in zip(planes, self.tables, channels, strict=True):
                cv2.LUT(plane, table, dst=channel)
        return images

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """uint8 [h, w, 3] of any size to float32 [in_chans, *img_size]."""
        return self.batch([image])[0]

    def batch(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Several images of any sizes to float32 [n, in_chans, *img_size]."""
        return self.assemble([self.pixels(image) for image in images])

    def unnormalise(self, image: np.ndarray) -> np.ndarray:
        """float32 [in_chans, h, w] back to uint8 [h, w, 3] for pictures, rounded and clipped."""
        mean, std = self.statistics
        pixels = (np.asarray(image, np.float32).transpose(1, 2, 0) * std + mean) * 255
        return np.repeat(np.rint(pixels).clip(0, 255).astype(np.uint8), 3 if self.in_chans == 1 else 1, axis=2)[..., :3]
