"""CPU devices in the place of planned ones: everything but the compiler is real."""

from tests.helpers.fake_devices import fake as fake, numbered as numbered
