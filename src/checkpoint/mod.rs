//! Where weights come from: `config.json` and safetensors files in the released layout (`numerics.md` §14).
//!
//! A [`Checkpoint`] that exists is whole: every tensor that the config calls for is there, with its shape, in a format
//! that the kernels read, and nothing else is. [`layout`] says what that is. Weights stay packed; [`Tensor`] shows them.
//!
//! Files lie in memory, mapped or whole, or are a [`Source`] that is read in pieces. [`Weight`] stands for a tensor of either
//! kind. Of a source only headers are read at first: its scales are checked when they are read.

mod fingerprint;
mod header;
pub mod layout;
mod source;
mod tensor;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::ops::Range;
use std::path::{Path, PathBuf};

use futures::FutureExt;
use safetensors::tensor::Dtype;

pub use fingerprint::Fingerprint;
pub(crate) use source::{check_scales, Bytes};
pub use source::{Fetched, Shared, Source, Weight};
pub use tensor::{Format, Tensor};

use crate::config::Config;
use crate::{Error, Result};
use layout::TensorSpec;

/// A validated set of weights.
#[derive(Debug)]
pub struct Checkpoint {
    config: Config,
    /// Of the whole `config.json`: a [`Config`] has only what the model's arithmetic needs.
    config_hash: [u8; 16],
    files: Vec<File>,
    tensors: BTreeMap<String, Stored>,
}

#[derive(Debug)]
struct File {
    path: PathBuf,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Here(Cow<'static, [u8]>),
    #[cfg(not(target_arch = "wasm32"))]
    Mapped(memmap2::Mmap),
    Elsewhere(Box<dyn Source>),
}

impl File {
    /// Bytes of the file, whose length was checked.
    fn bytes(&self, range: Range<u64>) -> Bytes<'_> {
        let here = range.start as usize..range.end as usize;
        match &self.content {
            Content::Here(bytes) => Bytes::Here(&bytes[here]),
            #[cfg(not(target_arch = "wasm32"))]
            Content::Mapped(map) => Bytes::Here(&map[here]),
            Content::Elsewhere(source) => {
                Bytes::There { source: &**source, start: range.start, length: range.end - range.start }
            }
        }
    }

    fn length(&self) -> u64 {
        match &self.content {
            Content::Here(bytes) => bytes.len() as u64,
            #[cfg(not(target_arch = "wasm32"))]
            Content::Mapped(map) => map.len() as u64,
            Content::Elsewhere(source) => source.bytes(),
        }
    }

    async fn header(&self) -> Result<BTreeMap<String, header::Entry>> {
        let length = self.length();
        let first = self.bytes(0..length.min(8));
        let header = self.bytes(header::range(&self.path, &first.read(0..first.len()).await?, length)?);
        header::parse(&self.path, &header.read(0..header.len()).await?, length)
    }

    #[cfg(not(target_arch = "wasm32"))]
    fn map(path: PathBuf) -> Result<Self> {
        let file = std::fs::File::open(&path).map_err(|e| Error::io(&path, e))?;
        // SAFETY: the map is read-only and dropped with `self`. Weight files are not written while a model is open; one
        // that is changed all the same gives wrong weights, or a fault when it is cut short, as with every mapped file.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| Error::io(&path, e))?;
        Ok(Self { path, content: Content::Mapped(map) })
    }
}

/// Where a validated tensor lies.
#[derive(Debug)]
struct Stored {
    file: usize,
    format: Format,
    shape: Vec<usize>,
    bytes: Range<u64>,
    scales: Option<Scales>,
}

/// Where its scales lie: not always in the same shard.
#[derive(Debug)]
struct Scales {
    file: usize,
    shape: [usize; 2],
    bytes: Range<u64>,
}

/// Every tensor of every file, by name, with the index of its file.
type Listing = BTreeMap<String, (usize, header::Entry)>;

impl Checkpoint {
    /// Opens a folder with `config.json` and `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    /// Files are mapped, not read.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let config_path = folder.join("config.json");
        let config = Config::open(&config_path)?;
        let json = std::fs::read_to_string(&config_path).map_err(|e| Error::io(&config_path, e))?;
        let config_hash = fingerprint::config_hash(&json);
        let index_path = folder.join("model.safetensors.index.json");
        if !index_path.exists() {
            return Self::new(config, config_hash, vec![File::map(folder.join("model.safetensors"))?]);
        }
        let text = std::fs::read_to_string(&index_path).map_err(|e| Error::io(&index_path, e))?;
        let index = read_index(&index_path, &text)?;
        let files = shards(&index).map(|name| File::map(folder.join(name))).collect::<Result<Vec<_>>>()?;
        let listing = now(list(&files))?;
        check_index(&index_path, &index, &files, &listing)?;
        Self::validated(config, config_hash, files, listing)
    }

    /// Takes the text of a `config.json` and the whole of each safetensors file, with its name. Bytes that are part of the program
    /// are not copied.
    pub fn from_files(config_json: &str, files: Vec<(String, impl Into<Cow<'static, [u8]>>)>) -> Result<Self> {
        let file = |(name, bytes): (String, _)| File { path: name.into(), content: Content::Here(Into::into(bytes)) };
        let config = Config::from_json(config_json)?;
        Self::new(config, fingerprint::config_hash(config_json), files.into_iter().map(file).collect())
    }

    /// Takes the texts of a `config.json` and of a `model.safetensors.index.json`, where there is one, and opens the files
    /// that the latter names, or `model.safetensors`. Their headers are read, and nothing else of them.
    ///
    /// # Errors
    /// Those of `open` and of the sources; those of a checkpoint that is not whole.
    pub async fn from_sources(
        config_json: &str,
        index_json: Option<&str>,
        mut open: impl FnMut(&str) -> Result<Box<dyn Source>>,
    ) -> Result<Self> {
        let config = Config::from_json(config_json)?;
        let config_hash = fingerprint::config_hash(config_json);
        let mut file = |name: &str| Ok(File { path: name.into(), content: Content::Elsewhere(open(name)?) });
        let Some(index_json) = index_json else {
            let files = vec![file("model.safetensors")?];
            let listing = list(&files).await?;
            return Self::validated(config, config_hash, files, listing);
        };
        let path = Path::new("model.safetensors.index.json");
        let index = read_index(path, index_json)?;
        let files = shards(&index).map(file).collect::<Result<Vec<_>>>()?;
        let listing = list(&files).await?;
        check_index(path, &index, &files, &listing)?;
        Self::validated(config, config_hash, files, listing)
    }

    fn new(config: Config, config_hash: [u8; 16], files: Vec<File>) -> Result<Self> {
        let listing = now(list(&files))?;
        Self::validated(config, config_hash, files, listing)
    }

    fn validated(config: Config, config_hash: [u8; 16], files: Vec<File>, mut listing: Listing) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        let draft = config.dspark.is_some() && listing.keys().any(|name| layout::is_draft(name));
        for spec in layout::expected(&config).into_iter().filter(|spec| spec.required || draft) {
            let stored = take(&spec, &mut listing, &files)?;
            tensors.insert(spec.name, stored);
        }
        check_rest(&listing, draft)?;
        Ok(Self { config, config_hash, files, tensors })
    }

    /// The model's config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether it has the draft stages that its config describes.
    pub fn has_draft(&self) -> bool {
        self.tensors.keys().any(|name| layout::is_draft(name))
    }

    /// Names of all tensors of the backbone and of the draft stages, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor of the backbone or of the draft stages, wherever its bytes are.
    ///
    /// # Errors
    /// [`Error::Tensor`] when there is none of this name.
    pub fn weight(&self, name: &str) -> Result<Weight<'_>> {
        let (name, stored) = self
            .tensors
            .get_key_value(name)
            .ok_or_else(|| Error::tensor(name, "nothing", "a tensor of this checkpoint"))?;
        let bytes = |file: usize, range: &Range<u64>| self.files[file].bytes(range.clone());
        Ok(Weight {
            name,
            shape: &stored.shape,
            format: stored.format,
            data: bytes(stored.file, &stored.bytes),
            scales: stored.scales.as_ref().map(|s| (bytes(s.file, &s.bytes), s.shape)),
        })
    }

    /// A tensor of the backbone or of the draft stages, in memory.
    ///
    /// # Errors
    /// [`Error::Tensor`] when there is none of this name, [`Error::Unsupported`] when its bytes are in a [`Source`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        let Weight { name, shape, format, data, scales } = self.weight(name)?;
        let here = |bytes| match bytes {
            Bytes::Here(bytes) => Ok(bytes),
            Bytes::There { source, .. } => {
                Err(Error::Unsupported { what: format!("tensor `{name}` in one piece: {source:?} is read in pieces") })
            }
        };
        let scales = scales.map(|(scales, shape)| Ok::<_, Error>((here(scales)?, shape))).transpose()?;
        Ok(Tensor { name, shape, format, data: here(data)?, scales })
    }
}

/// The result of reading files that are in memory.
fn now<T>(reading: impl Future<Output = Result<T>>) -> Result<T> {
    reading.now_or_never().expect("reading memory does not wait")
}

/// Reads all headers. No name may come twice.
async fn list(files: &[File]) -> Result<Listing> {
    let mut listing = Listing::new();
    for (i, file) in files.iter().enumerate() {
        for (name, entry) in file.header().await? {
            if let Some((first, _)) = listing.get(&name) {
                let found = format!("it in {} and in {}", files[*first].path.display(), file.path.display());
                return Err(Error::tensor(name, found, "it once"));
            }
            listing.insert(name, (i, entry));
        }
    }
    Ok(listing)
}

/// Takes a tensor and its scales out of the listing, checked against its spec.
fn take(spec: &TensorSpec, listing: &mut Listing, files: &[File]) -> Result<Stored> {
    let allowed = || {
        let choices = spec.formats.iter().map(|&format| {
            let (dtype, shape, scale) = spec.stored(format);
            let scale = scale.map(|s| format!(" with scale {s:?}")).unwrap_or_default();
            format!("{dtype} {shape:?}{scale}")
        });
        choices.collect::<Vec<_>>().join(" or ")
    };
    let error = |found: String| Error::tensor(&spec.name, found, allowed());
    let (file, entry) = listing.remove(&spec.name).ok_or_else(|| error("nothing".into()))?;
    let fits = |&&format: &&Format| {
        let (dtype, shape, _) = spec.stored(format);
        dtype == entry.dtype && shape == entry.shape
    };
    let format = spec.formats.iter().find(fits).copied();
    // Two channels share a byte: an odd width has no FP4 form.
    let format = format.filter(|&f| f != Format::Fp4 || spec.shape[1].is_multiple_of(2));
    let format = format.ok_or_else(|| error(format!("{} {:?}", entry.dtype, entry.shape)))?;
    let scales = match spec.stored(format).2 {
        None => None,
        Some(shape) => {
            let name = spec.scale_name().expect("packed tensors are named X.weight");
            let (file, scale) = listing
                .remove(&name)
                .ok_or_else(|| error(format!("{} {:?} without `{name}`", entry.dtype, entry.shape)))?;
            if scale.dtype != Dtype::F8_E8M0 || scale.shape != shape {
                let found = format!("{} {:?}", scale.dtype, scale.shape);
                return Err(Error::tensor(name, found, format!("{} {shape:?}", Dtype::F8_E8M0)));
            }
            if let Bytes::Here(bytes) = files[file].bytes(scale.bytes.clone()) {
                check_scales(&spec.name, bytes, shape[1], 0)?;
            }
            Some(Scales { file, shape, bytes: scale.bytes })
        }
    };
    Ok(Stored { file, format, shape: spec.shape.clone(), bytes: entry.bytes, scales })
}

/// What no spec has taken must be a tensor that is left alone, with its scale. With `draft`, that is no tensor of a draft stage.
fn check_rest(rest: &Listing, draft: bool) -> Result<()> {
    for (name, (_, entry)) in rest {
        let found = format!("{} {:?}", entry.dtype, entry.shape);
        match name.strip_suffix(".scale").map(|stem| format!("{stem}.weight")) {
            Some(weight) if !rest.contains_key(&weight) => {
                return Err(Error::tensor(name, found, format!("no scale without a packed `{weight}`")));
            }
            _ if layout::is_deferred(name) && !(draft && layout::is_draft(name)) => {}
            _ => return Err(Error::tensor(name, found, "no tensor of this name in a model of this config")),
        }
        let packed = matches!(entry.dtype, Dtype::F8_E4M3 | Dtype::I8);
        match name.strip_suffix(".weight").map(|stem| format!("{stem}.scale")) {
            Some(scale) if packed && !rest.contains_key(&scale) => {
                return Err(Error::tensor(
                    name,
                    format!("{found} without `{scale}`"),
                    "a packed weight with its scale",
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The weight map of an index file with this text: tensor name to shard.
fn read_index(path: &Path, text: &str) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_str(text).map_err(|e| Error::malformed(path, format!("not an index: {e}")))?;
    // A shard lies beside the index, never elsewhere.
    let elsewhere =
        |shard: &&String| Path::new(shard.as_str()).file_name() != Some(std::ffi::OsStr::new(shard.as_str()));
    match index.weight_map.values().find(elsewhere) {
        Some(shard) => Err(Error::malformed(path, format!("shard `{shard}` is not a plain file name"))),
        None => Ok(index.weight_map),
    }
}

/// The shards that an index names.
fn shards(index: &BTreeMap<String, String>) -> impl Iterator<Item = &str> {
    index.values().map(String::as_str).collect::<BTreeSet<_>>().into_iter()
}

/// Index and shards must list the same tensors in the same places.
fn check_index(path: &Path, index: &BTreeMap<String, String>, files: &[File], listing: &Listing) -> Result<()> {
    let shard = |i: usize| files[i].path.file_name().unwrap_or_default();
    for (name, expected) in index {
        let found = listing.get(name).map(|(i, _)| shard(*i));
        if found != Some(std::ffi::OsStr::new(expected)) {
            let place = found.map_or("no shard has it".into(), |f| format!("it is in {}", f.to_string_lossy()));
            return Err(Error::malformed(path, format!("tensor `{name}` is said to be in {expected}, {place}")));
        }
    }
    match listing.iter().find(|(name, _)| !index.contains_key(*name)) {
        Some((name, (i, _))) => {
            let problem = format!("tensor `{name}` of {} is not listed", shard(*i).to_string_lossy());
            Err(Error::malformed(path, problem))
        }
        None => Ok(()),
    }
}
