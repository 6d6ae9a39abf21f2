"""What vLLM loads at its start (entry point vllm.general_plugins), in each of its processes.

It only makes names known: it imports neither the connector nor torch.
"""


def register():
    """`"kv_connector": "RipienoConnector"` needs no kv_connector_module_path, and neither does a
    secondary tier of `"type": "ripieno"` its module_path."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "RipienoConnector"
    # vLLM may load its plugins more than once.
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "ripieno.vllm", name)
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if "ripieno" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("ripieno", "ripieno.tiering", "RipienoTier")
