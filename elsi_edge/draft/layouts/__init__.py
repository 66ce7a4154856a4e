"""Drafts in the layouts of other tools: vLLM's speculators library, SpecForge (SGLang) and OpenVINO. No torch."""

from elsi_edge.draft.layouts.read import ImportedDraft as ImportedDraft
from elsi_edge.draft.layouts.read import import_draft as import_draft
from elsi_edge.draft.layouts.spec import LAYOUTS as LAYOUTS
from elsi_edge.draft.layouts.spec import Layout as Layout
from elsi_edge.draft.layouts.spec import Target as Target
from elsi_edge.draft.layouts.write import export_draft as export_draft
