"""Plugin that vLLM loads at startup in each of its processes (entry point vllm.general_plugins).

It only registers names: it imports neither the connector nor torch.
"""

VLLM = ("0.32", "0.33")


def require_vllm() -> None:
    """Raises ImportError with a one-sentence message if another version of vLLM is installed."""
    import vllm

    if not f"{vllm.__version__}.".startswith(tuple(f"{each}." for each in VLLM)):
        raise ImportError(
            f"ripieno works with vLLM {' and '.join(VLLM)}, and vLLM {vllm.__version__} is "
            f'installed: install one of them anew (pip install "vllm=={VLLM[-1]}.*"), or leave its '
            "connector out"
        )


def register() -> None:
    """Registers `"kv_connector": "RipienoConnector"` and the secondary tier `"type": "ripieno"`, so
    that neither needs its module path.

    An exception in a plugin would end vLLM, so with another version this only warns; importing one
    of these classes then raises the reason.
    """
    for make_known in (_connector, _tier):
        try:
            make_known()
        except (ImportError, AttributeError) as error:
            _warn(error)
            return


def _connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "RipienoConnector"
    # vLLM may load its plugins more than once.
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "ripieno.vllm", name)


def _tier() -> None:
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if "ripieno" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("ripieno", "ripieno.tiering", "RipienoTier")


def _warn(error: Exception) -> None:
    import logging

    try:
        require_vllm()
    except ImportError as version:
        error = version
    logging.getLogger("vllm.ripieno").warning("%s", error)
