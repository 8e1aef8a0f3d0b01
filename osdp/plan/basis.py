"""Basis: what a plan was searched from, so that it can be explained and planned again without the model."""

from dataclasses import dataclass

from osdp.codec import Savable
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.plan.search_options import SearchOptions


@dataclass(frozen=True)
class Basis(Savable):
    """The values that a search of a plan of the whole model was given.

    Attributes:
        model_desc: The model.
        device: The devices, their links and the memory limit.
        trainings: The trainings that the search chose from, each with a local batch.
        profiles: A profile for each of these local batches.
        options: What the search was allowed to choose.
    """

    model_desc: ModelDesc
    device: DeviceInfo
    trainings: tuple[Training, ...]
    profiles: tuple[Profile, ...]
    options: SearchOptions

    def __post_init__(self) -> None:
        batches = {profile.local_batch for profile in self.profiles}
        if missing := sorted({str(t.local_batch) for t in self.trainings if t.local_batch not in batches}):
            raise ValueError(f"the basis has no profile at local batch {', '.join(missing)}")

    def profile_at(self, local_batch: int) -> Profile:
        """The profile at ``local_batch`` samples.

        Raises:
            ValueError: There is none.
        """
        for profile in self.profiles:
            if profile.local_batch == local_batch:
                return profile
        known = ", ".join(str(profile.local_batch) for profile in self.profiles)
        raise ValueError(f"there is no profile at local batch {local_batch}, only at {known}")

    def profile_near(self, local_batch: int) -> Profile:
        """The profile whose batch is nearest to ``local_batch`` samples."""
        return min(self.profiles, key=lambda profile: abs(profile.local_batch - local_batch))
