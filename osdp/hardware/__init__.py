"""What devices and links can do, and what one model takes on them, as values.

Start at :meth:`osdp.hardware.device_info.DeviceInfo.detect`. No torch.

- ``device_info``: memory limit, number of devices, latency and bandwidth of their links
- ``profile``: seconds and activation bytes of each segment on one kind of device
- ``token_latency``: seconds of a pipeline stage for a slice of a sequence
"""
