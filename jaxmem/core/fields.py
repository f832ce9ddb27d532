"""The one form of error for an impossible value in a training config."""


def check_field(config: object, name: str, good: bool, wanted: str) -> None:
    """Raise a ValueError that names the field of a config unless its value is good.

    Args:
      config: the dataclass; its class is named too.
      name: of the field.
      good: whether the value is fine.
      wanted: what it must be, in words.
    """
    if not good:
        raise ValueError(
            f"{type(config).__name__}.{name} must be {wanted}, "
            f"got {getattr(config, name)!r}"
        )
