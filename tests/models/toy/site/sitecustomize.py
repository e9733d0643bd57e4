"""Makes every Python process with this folder on PYTHONPATH serve the toy family."""

from tests.models.toy.family import register

register()
