"""All Hugging Face model families, by name: one row of settings and tensor names each, for import
and export.
"""

from dantinox.interop.hf.hf_dense_families import DENSE_FAMILIES
from dantinox.interop.hf.hf_expert_families import EXPERT_FAMILIES

# For a model that was not imported, export tries the families in this order.
FAMILIES = DENSE_FAMILIES | EXPERT_FAMILIES
