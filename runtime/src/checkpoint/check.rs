//! What must hold between the settings, the layout and the files before a weight is read.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::files::{Files, TensorEntry};
use super::layout::{Layout, NVFP4_GROUP, Part, Spec, Stored, Unlike, unlike};
use crate::config::{Claim, Covers, Family, ModelConfig};
use crate::error::{FormatError, LoadError, Located};

/// Requires that the tensors found are the tensors expected, in forms that this build reads and that the settings name.
pub(super) fn check(
    dir: &Path,
    config: &ModelConfig,
    layout: &Layout,
    files: &Files,
) -> Result<(), LoadError> {
    let format = |problem| LoadError::Format { dir: dir.into(), problem };
    let specs = layout.specs();
    // Forms come before names: a form that is not known has companions that are not known.
    known_names(files).map_err(format)?;
    types(&specs, files).map_err(format)?;
    scales(&specs, files).map_err(format)?;
    alike(layout, files).map_err(format)?;
    names(dir, &specs, files)?;
    shapes(&specs, files)?;
    groups(&specs, files).map_err(format)?;
    claims(config, layout, &specs, files).map_err(format)
}

/// Refuses tensors that only layouts of other programs have.
fn known_names(files: &Files) -> Result<(), FormatError> {
    const FOREIGN: [(&str, &str); 5] = [
        (".scales", "MLX 4-bit"),
        (".biases", "MLX 4-bit"),
        (".qweight", "GPTQ or AWQ"),
        (".qzeros", "GPTQ or AWQ"),
        (".g_idx", "GPTQ or AWQ"),
    ];
    let foreign = files.tensors.iter().filter_map(|(name, entry)| {
        let (_, layout) = FOREIGN.iter().find(|(end, _)| name.ends_with(end))?;
        Some((name, entry, *layout))
    });
    match foreign.min_by_key(|(name, ..)| *name) {
        None => Ok(()),
        Some((name, entry, layout)) => {
            let what = format!("tensor {name} in {}", files.name(entry.file));
            Err(FormatError::Foreign { what, layout })
        }
    }
}

fn types(specs: &[&Spec], files: &Files) -> Result<(), FormatError> {
    for (spec, entry) in present(specs, files) {
        if !spec.dtypes.contains(&entry.dtype) {
            return Err(FormatError::Dtype {
                tensor: spec.name.clone(),
                file: files.name(entry.file),
                found: entry.dtype,
                permitted: spec.dtypes,
            });
        }
    }
    Ok(())
}

/// Requires that every quantised weight has its scales.
fn scales(specs: &[&Spec], files: &Files) -> Result<(), FormatError> {
    let absent = |spec: &&Spec| !files.tensors.contains_key(&spec.name);
    let mut lacking = present(specs, files).filter(|(spec, _)| spec.scales().any(|scale| absent(&scale)));
    let Some((spec, entry)) = lacking.next() else { return Ok(()) };
    let mut absent: Vec<String> = spec.scales().filter(absent).map(|scale| scale.name.clone()).collect();
    if let Stored::Fp8Block { scale } = &spec.stored {
        absent.push(scale.name.trim_end_matches("_inv").into());
    }
    Err(FormatError::NoScale {
        tensor: spec.name.clone(),
        file: files.name(entry.file),
        found: entry.dtype,
        absent,
        others: lacking.count(),
    })
}

fn alike(layout: &Layout, files: &Files) -> Result<(), FormatError> {
    match unlike(layout, files) {
        None => Ok(()),
        Some(Unlike { what, pair }) => {
            let pair = pair
                .map(|(spec, format)| located(spec, &files.tensors[&spec.name], files, format.to_string()));
            Err(FormatError::Mixed { what, pair: pair.into() })
        }
    }
}

fn names(dir: &Path, specs: &[&Spec], files: &Files) -> Result<(), LoadError> {
    let absent = specs.iter().filter(|spec| !files.tensors.contains_key(&spec.name));
    let matched = specs.len() - absent.clone().count();
    let missing: Vec<String> = absent.filter(|spec| spec.required).map(|spec| spec.name.clone()).collect();
    let mut left_over = Vec::new();
    if matched < files.tensors.len() {
        let expected: HashSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        left_over = surplus(&files.tensors, &expected);
    }
    match missing.is_empty() && left_over.is_empty() {
        true => Ok(()),
        false => Err(LoadError::Tensors { dir: dir.into(), missing, left_over }),
    }
}

fn surplus(found: &HashMap<String, TensorEntry>, expected: &HashSet<&str>) -> Vec<String> {
    let mut names: Vec<String> =
        found.keys().filter(|name| !expected.contains(name.as_str())).cloned().collect();
    names.sort_unstable();
    names
}

fn shapes(specs: &[&Spec], files: &Files) -> Result<(), LoadError> {
    for (spec, entry) in present(specs, files) {
        let expected = spec.stored_shape();
        let single = expected.is_empty() && entry.shape == [1];
        if entry.shape != expected && !single {
            return Err(LoadError::Shape {
                tensor: spec.name.clone(),
                path: files.files[entry.file].path.clone(),
                found: entry.shape.clone(),
                expected,
            });
        }
    }
    Ok(())
}

/// Requires that 4-bit codes fill their groups.
fn groups(specs: &[&Spec], files: &Files) -> Result<(), FormatError> {
    for (spec, entry) in present(specs, files) {
        let columns = spec.shape.last().copied().unwrap_or_default();
        if matches!(spec.stored, Stored::Nvfp4 { .. }) && !columns.is_multiple_of(NVFP4_GROUP) {
            return Err(FormatError::Width {
                tensor: spec.name.clone(),
                file: files.name(entry.file),
                columns,
                group: NVFP4_GROUP,
            });
        }
    }
    Ok(())
}

/// Compares what the settings say about quantised weights with the files.
fn claims(config: &ModelConfig, layout: &Layout, specs: &[&Spec], files: &Files) -> Result<(), FormatError> {
    let quantised: Vec<_> = present(specs, files)
        .filter_map(|(spec, entry)| Some((spec, entry, family(&spec.stored)?)))
        .collect();
    let covered = |claim: &Claim, spec: &Spec| claim.covers == Covers::All || spec.part == Part::Table;
    for claim in &config.quantisation {
        for said in &claim.families {
            if !quantised.iter().any(|(spec, _, family)| family == said && covered(claim, spec)) {
                return Err(FormatError::NothingStored {
                    place: claim.place.clone(),
                    says: claim.says.clone(),
                    format: said.to_string(),
                    stored: layout.formats.to_string(),
                });
            }
        }
    }
    // Exports with a converted table often say nothing of it; any word of quantisation is enough for that.
    let says = |claim: &Claim, spec: &Spec, family: &Family| {
        covered(claim, spec) && (spec.part == Part::Table || claim.families.contains(family))
    };
    let unsaid = |(spec, _, family): &&(&Spec, _, Family)| {
        !config.quantisation.iter().any(|claim| says(claim, spec, family))
    };
    match quantised.iter().find(unsaid) {
        None => Ok(()),
        Some((spec, entry, family)) => Err(FormatError::NothingSaid {
            tensor: located(spec, entry, files, family.to_string()).into(),
            stored: layout.formats.to_string(),
        }),
    }
}

fn family(stored: &Stored) -> Option<Family> {
    match stored {
        Stored::Plain => None,
        Stored::Fp8Block { .. } | Stored::Fp8Tensor { .. } => Some(Family::Fp8),
        Stored::Nvfp4 { .. } => Some(Family::Nvfp4),
    }
}

fn present<'a>(specs: &'a [&'a Spec], files: &'a Files) -> impl Iterator<Item = (&'a Spec, &'a TensorEntry)> {
    specs.iter().filter_map(|spec| Some((*spec, files.tensors.get(&spec.name)?)))
}

fn located(spec: &Spec, entry: &TensorEntry, files: &Files, format: String) -> Located {
    Located { tensor: spec.name.clone(), file: files.name(entry.file), format }
}
