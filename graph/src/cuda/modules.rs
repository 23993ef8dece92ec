//! The loaded kernels of one device: modules by source, functions by definition.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::code;
use super::driver::{Context, Failure, Function, Module};
use crate::digest::Digest;
use crate::emission::{self, Emission};
use crate::error::{Error, Result};
use crate::kernel::{Definition, Source, Twin};

pub(super) struct Modules {
    /// What code is compiled for.
    architecture: String,
    loaded: Mutex<Loaded>,
}

/// Source, kernel and element.
type Name = (&'static str, &'static str, &'static str);

#[derive(Default)]
struct Loaded {
    /// By the digest of the source. They stay for the life of the device: captured graphs point into them.
    modules: HashMap<Digest, Module>,
    /// By what names a definition: one definition may have several addresses.
    functions: HashMap<Name, Function>,
}

impl Modules {
    pub(super) fn new(architecture: String) -> Modules {
        Modules { architecture, loaded: Mutex::default() }
    }

    pub(super) fn architecture(&self) -> &str {
        &self.architecture
    }

    /// The function of each launch of `emission`, in order; none if one of them is not loaded.
    pub(super) fn find(&self, emission: &Emission) -> Option<Vec<Function>> {
        let loaded = self.loaded.lock();
        let launches = emission.entries().iter().filter_map(|entry| match *entry {
            emission::Entry::Launch { kernel, .. } => Some(loaded.functions.get(&name(kernel)).copied()),
            _ => None,
        });
        launches.collect()
    }

    /// The function of one definition, if it is loaded.
    pub(super) fn function(&self, definition: &Definition) -> Option<Function> {
        self.loaded.lock().functions.get(&name(definition)).copied()
    }

    /// Compiles, or finds in the cache, and loads the twins of `definitions`. Those without a twin are
    /// passed over: the host alone runs them.
    pub(super) fn prepare(&self, context: &Arc<Context>, definitions: &[&'static Definition]) -> Result<()> {
        let mut loaded = self.loaded.lock();
        let mut missing = code::by_source(definitions);
        let known = |definition: &&Definition| loaded.functions.contains_key(&name(definition));
        missing.retain(|(_, siblings)| !siblings.iter().all(known));
        let mut compiled = missing.clone();
        compiled.retain(|(source, _)| !loaded.modules.contains_key(&code::identity(source)));
        for ((source, _), code) in compiled.iter().zip(code::cached_each(&compiled, &self.architecture)) {
            let module = Module::load(context, &code?.cubin);
            let module = module.map_err(|failure| refused(source, "load", failure))?;
            loaded.modules.insert(code::identity(source), module);
        }
        for (source, siblings) in missing {
            let module = &loaded.modules[&code::identity(source)];
            let functions = siblings.iter().map(|definition| {
                let twin = twin(definition)?;
                Ok((name(definition), function(module, definition, &twin)?))
            });
            let functions = functions.collect::<Result<Vec<_>>>()?;
            loaded.functions.extend(functions);
        }
        Ok(())
    }
}

/// The twin of a definition.
pub(super) fn twin(definition: &Definition) -> Result<Twin> {
    definition.twin.ok_or_else(|| {
        let element = if definition.element.is_empty() { "it" } else { definition.element };
        Error::Launch { kernel: definition.name, why: format!("{element} runs on the host device only") }
    })
}

/// Finds the kernel of a twin and checks that it takes the argument block by value as its only parameter.
fn function(module: &Module, definition: &Definition, twin: &Twin) -> Result<Function> {
    let doing = || format!("find `{}` of", twin.symbol);
    let function = module.function(twin).map_err(|failure| refused(twin.source, &doing(), failure))?;
    let parameters =
        module.parameters(function).map_err(|failure| refused(twin.source, &doing(), failure))?;
    match parameters[..] == [definition.args_bytes] {
        true => Ok(function),
        false => Err(Error::Launch {
            kernel: definition.name,
            why: format!(
                "its CUDA twin `{}` takes parameters of {parameters:?} bytes and its argument block has {}",
                twin.symbol, definition.args_bytes
            ),
        }),
    }
}

fn refused(source: &Source, doing: &str, failure: Failure) -> Error {
    let (name, says) = failure.words();
    Error::Code { source: source.name.into(), doing: doing.into(), why: format!("{name} ({says})") }
}

fn name(definition: &Definition) -> Name {
    (definition.twin.map_or("", |twin| twin.source.name), definition.name, definition.element)
}
