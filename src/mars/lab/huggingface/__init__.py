"""GPT-2 as Hugging Face stores it: folders of ours for their tools, and theirs for ours."""

from mars.lab.huggingface.folder import Folder, is_folder

__all__ = ["Folder", "is_folder"]
