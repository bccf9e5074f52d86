//! Named intermediates of a forward, under the names and shapes of the recorded reference (`numerics.md` §19).

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};

use crate::{Error, Result};

/// Values of a recorded tensor.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// Activations, scores, weights.
    F32(Vec<f32>),
    /// Expert and entry ids; -1 fills rows that have fewer.
    I32(Vec<i32>),
    /// Rows of Engram tables.
    I64(Vec<i64>),
    /// Masks.
    Bool(Vec<bool>),
}

/// A recorded tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorded {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values, row-major.
    pub values: Values,
}

/// What a forward leaves behind for comparison: `layer_NN.<name>` and `top.<name>`, and what a draft does: `dspark.stageN.<name>`
/// and `dspark.<name>`. A later forward replaces what an
/// earlier one recorded.
#[derive(Debug, Clone)]
pub struct Trace {
    on: bool,
    scope: String,
    tensors: BTreeMap<String, Recorded>,
}

impl Trace {
    /// A trace that records.
    pub fn new() -> Self {
        Self { on: true, scope: "top".into(), tensors: BTreeMap::new() }
    }

    /// A trace that records nothing.
    pub fn off() -> Self {
        Self { on: false, ..Self::new() }
    }

    /// Whether it records.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// What comes next belongs to a layer, or to none.
    pub fn enter(&mut self, layer: Option<usize>) {
        if self.on {
            self.scope = layer.map_or("top".into(), |index| format!("layer_{index:02}"));
        }
    }

    /// What comes next belongs to the draft: to one of its stages, or to none.
    pub fn enter_draft(&mut self, stage: Option<usize>) {
        if self.on {
            self.scope = stage.map_or("dspark".into(), |index| format!("dspark.stage{index}"));
        }
    }

    /// Records values under the current scope.
    pub fn record(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        self.put(name, shape, || Values::F32(values.to_vec()));
    }

    /// Records whatever `values` makes, which is not asked when the trace is off.
    pub fn put(&mut self, name: &str, shape: &[usize], values: impl FnOnce() -> Values) {
        if self.on {
            let recorded = Recorded { shape: shape.to_vec(), values: values() };
            debug_assert_eq!(recorded.len(), shape.iter().product::<usize>(), "{name} {shape:?}");
            self.tensors.insert(format!("{}.{name}", self.scope), recorded);
        }
    }

    /// A recorded tensor by its full name.
    pub fn get(&self, name: &str) -> Option<&Recorded> {
        self.tensors.get(name)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Recorded)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Those whose full names `keep` accepts.
    pub fn filter(mut self, keep: impl Fn(&str) -> bool) -> Self {
        self.tensors.retain(|name, _| keep(name));
        self
    }

    /// Writes them as one safetensors file.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let bytes: Vec<(&str, &Recorded, Vec<u8>)> = self.iter().map(|(name, t)| (name, t, t.bytes())).collect();
        let malformed = |e: safetensors::SafeTensorError| Error::malformed(path, e.to_string());
        let views =
            bytes.iter().map(|(name, t, bytes)| Ok((*name, TensorView::new(t.dtype(), t.shape.clone(), bytes)?)));
        let views = views.collect::<std::result::Result<Vec<_>, _>>().map_err(malformed)?;
        let file = safetensors::serialize(views, None).map_err(malformed)?;
        std::fs::write(path, file).map_err(|e| Error::io(path, e))
    }
}

impl Default for Trace {
    fn default() -> Self {
        Self::new()
    }
}

impl Recorded {
    fn len(&self) -> usize {
        match &self.values {
            Values::F32(v) => v.len(),
            Values::I32(v) => v.len(),
            Values::I64(v) => v.len(),
            Values::Bool(v) => v.len(),
        }
    }

    fn dtype(&self) -> Dtype {
        match &self.values {
            Values::F32(_) => Dtype::F32,
            Values::I32(_) => Dtype::I32,
            Values::I64(_) => Dtype::I64,
            Values::Bool(_) => Dtype::BOOL,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match &self.values {
            Values::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::I32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::I64(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::Bool(v) => v.iter().map(|&x| x as u8).collect(),
        }
    }
}
