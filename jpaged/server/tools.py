"""Owns what a request says of tools: `check_tools`, and `forced_schema` for an answer that has to be a call."""

from __future__ import annotations

import re
from typing import Any

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NAME_RULE = "1 to 64 letters, digits, _ and -"

# Of JSON schema: keywords whose value maps names to schemas, and those whose value is data, whatever it looks like.
_NAMED_SCHEMAS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_DATA = {"const", "enum", "default", "example", "examples"}


def check_tools(tools: Any, tool_choice: Any) -> None:
    """Whether these are OpenAI's `tools` and `tool_choice`; None counts as not given.

    Raises ValueError, which begins with the place: `tools[0].function.name must be ...`.
    """
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"tools must be a list of tools, got {_short(tools)}")
    names: dict[str, int] = {}
    for i, tool in enumerate(tools or []):
        name = _check_tool(f"tools[{i}]", tool)
        if name in names:
            raise ValueError(
                f"tools[{i}].function.name is {name!r}, which is the name of tools[{names[name]}], too: rename one"
            )
        names[name] = i
    _check_choice(tool_choice, names)


def _check_tool(where: str, tool: Any) -> str:
    """The tool's name."""
    if not isinstance(tool, dict):
        raise ValueError(
            f'{where} must be an object like {{"type": "function", "function": {{"name": ...}}}}, got {_short(tool)}'
        )
    if tool.get("type") != "function":
        raise ValueError(f'{where}.type must be "function", the only kind there is, got {_short(tool.get("type"))}')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{where}.function must be an object with a name, got {_short(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}.function.name must be {_NAME_RULE}, got {_short(name)}")
    description, strict = function.get("description"), function.get("strict")
    if not isinstance(description, str | None):
        raise ValueError(f"{where}.function.description must be a string, got {_short(description)}")
    if not isinstance(strict, bool | None):
        raise ValueError(f"{where}.function.strict must be true or false, got {_short(strict)}")
    _check_parameters(f"{where}.function.parameters", function.get("parameters"))
    return name


def _check_parameters(where: str, parameters: Any) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise ValueError(
            f'{where} must be a JSON schema like {{"type": "object", "properties": {{...}}}}, got {_short(parameters)}'
        )
    kind = parameters.get("type", "object")
    if kind != "object":
        raise ValueError(f'{where}.type must be "object", as arguments have names, got {_short(kind)}')
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise ValueError(f"{where}.properties must map names to JSON schemas, got {_short(properties)}")


def _check_choice(choice: Any, names: dict[str, int]) -> None:
    if choice is None or choice in ("none", "auto"):
        return
    if choice == "required":
        if not names:
            raise ValueError('tool_choice is "required", which needs tools to choose from: give tools')
        return
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        raise ValueError(
            'tool_choice must be "none", "auto", "required" or an object like '
            f'{{"type": "function", "function": {{"name": "..."}}}}, got {_short(choice)}'
        )
    if name not in names:
        known = ", ".join(names) or "none"
        raise ValueError(f"tool_choice names the function {_short(name)}, which is not among the tools ({known})")


def forced_schema(tools: list[dict[str, Any]], tool_choice: str | dict[str, Any], parallel: bool) -> dict[str, Any]:
    """The JSON schema of an answer that has to be a call: of the arguments of the function that is named, or, for
    "required", of a list of `{"name": ..., "parameters": {...}}`, of one if not `parallel`.

    Both are what `check_tools` lets pass. Raises ValueError for parameters that are nested too deep.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    try:
        if isinstance(tool_choice, dict):
            return _parameters(functions[tool_choice["function"]["name"]])
        return _list_of_calls(functions, parallel)
    except RecursionError:
        raise ValueError("tools have parameters that are nested too deep: make them flatter") from None


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object."""
    given = function.get("parameters") or {}
    # Their place is within another schema, of which these would make two.
    return {"type": "object"} | {key: value for key, value in given.items() if key not in ("$schema", "$id")}


def _list_of_calls(functions: dict[str, dict[str, Any]], parallel: bool) -> dict[str, Any]:
    definitions, calls = {}, []
    for name, function in functions.items():
        # Each schema is a definition of its own, so that no two names in them meet; its references go there.
        place = f"#/$defs/{name}"
        definitions[name] = _moved(_parameters(function), place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": place}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
    return schema if parallel else {**schema, "maxItems": 1}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its root, and what lies under it, go to another place."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            moved[key] = {name: _moved(part, place) for name, part in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, place)
    return moved


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
