"""Write the charts' JavaScript, Vega as vl-convert bundles it, into the package.

    python docs/vega_bundle.py      # after a change of vl-convert-python's version in constraints.txt

It lies in the package because vl-convert makes it with V8, which reserves address space for
gigabytes, and ends the process where that is limited (`ulimit -v`, as batch systems set it).
"""

from importlib.metadata import version
from pathlib import Path

import vl_convert

from treeward.evaluation.report import build

LICENCE = """/*
Vega, Vega-Lite and Vega-Embed, as bundled by vl-convert %s. https://vega.github.io

Copyright (c) 2015-2023, University of Washington Interactive Data Lab. All rights reserved.

Redistribution and use in source and binary forms, with or without modification, are permitted
provided that the following conditions are met:

1. Redistributions of source code must retain the above copyright notice, this list of conditions
   and the following disclaimer.
2. Redistributions in binary form must reproduce the above copyright notice, this list of
   conditions and the following disclaimer in the documentation and/or other materials provided
   with the distribution.
3. Neither the name of the copyright holder nor the names of its contributors may be used to
   endorse or promote products derived from this software without specific prior written
   permission.

THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR
IMPLIED WARRANTIES, INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND
FITNESS FOR A PARTICULAR PURPOSE ARE DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR
CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL
DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR SERVICES; LOSS OF USE,
DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER
IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF
THE USE OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.
*/
"""


def bundle() -> str:
    """The text of the file."""
    script: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # the default is missing in its stubs
    return LICENCE % version("vl-convert-python") + script


if __name__ == "__main__":
    Path(build.__file__).with_name("vega.js").write_text(bundle(), encoding="utf-8")
