"""The training program as torchrun starts it, on devices that nobody measured."""

from examples import train_text
from tests.helpers.devices import known_devices

if __name__ == "__main__":
    with known_devices():
        train_text.main()
