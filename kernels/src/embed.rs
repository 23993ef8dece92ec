//! The embedding: what a row's streams hold before the first layer, looked up by its id or taken of a picture.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::numerics::Element;
use crate::source;
use crate::state::RowRange;

/// Looks up a row's id and repeats the embedding in every stream.
///
/// ```text
/// R[t, s, j] = table[id[t], j]
/// ```
/// Shapes     table: `[vocab, hidden]`, R: `[rows, streams, hidden]`, elements
/// Domain     every id is below vocab
/// Effects    writes R of the covered rows
pub struct Embed<E>(PhantomData<E>);

/// Arguments of [`Embed`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The rows.
    pub rows: RowRange,
    /// The table.
    pub table: Ptr<u8>,
    /// R, row 0 first.
    pub streams: Ptr<u8>,
    /// Number of embeddings.
    pub vocab: u32,
    /// Width of a stream.
    pub hidden: u32,
    /// Number of streams.
    pub count: u32,
    /// Not used; zero.
    pub zero: u32,
}

impl<E: Element> Kernel for Embed<E> {
    type Args = Args;
    const NAME: &'static str = "embed";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::EMBED, Self::NAME, 128);

    fn check(args: &Args) -> Result<(), String> {
        match !args.rows.is_empty() && args.hidden > 0 && args.count > 0 {
            true => Ok(()),
            false => Err(format!(
                "rows {}, hidden {}, streams {}: all positive",
                args.rows.count, args.hidden, args.count
            )),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(args.rows.len())
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let (hidden, width) = (args.hidden as usize, args.hidden as usize * args.count as usize);
        let facts = args.rows.read(memory)?;
        let streams =
            memory.write::<E>(args.streams.cast::<E>().at(args.rows.start() * width), facts.len() * width)?;
        for (fact, row) in facts.iter().zip(streams.chunks_exact_mut(width)) {
            if fact.id >= args.vocab {
                return Err(memory.domain(format!("id {} is past the vocabulary of {}", fact.id, args.vocab)));
            }
            let embedding = memory.read::<E>(args.table.cast::<E>().at(fact.id as usize * hidden), hidden)?;
            row.chunks_exact_mut(hidden).for_each(|stream| stream.copy_from_slice(embedding));
        }
        Ok(())
    }
}

/// Repeats features of a picture in every stream of consecutive rows, instead of what their placeholder ids stand for.
///
/// ```text
/// R[t, s, j] = features[t, j]
/// ```
/// Shapes     features: `[rows, hidden]`, R: `[rows, streams, hidden]`, elements
/// Effects    writes all of R
/// Source     MODEL: top-level order
pub struct EmbedFeatures<E>(PhantomData<E>);

/// Arguments of [`EmbedFeatures`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct FeatureArgs {
    /// features.
    pub features: Ptr<u8>,
    /// R of the first of these rows.
    pub streams: Ptr<u8>,
    /// Number of rows.
    pub rows: u32,
    /// Width of a stream.
    pub hidden: u32,
    /// Number of streams.
    pub count: u32,
    /// Not used; zero.
    pub zero: u32,
}

impl<E: Element> Kernel for EmbedFeatures<E> {
    type Args = FeatureArgs;
    const NAME: &'static str = "embed_features";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::EMBED, Self::NAME, 128);

    fn check(args: &FeatureArgs) -> Result<(), String> {
        match args.rows > 0 && args.hidden > 0 && args.count > 0 {
            true => Ok(()),
            false => Err(format!(
                "rows {}, hidden {}, streams {}: all positive",
                args.rows, args.hidden, args.count
            )),
        }
    }

    fn grid(args: &FeatureArgs) -> Grid {
        Grid::line(args.rows as usize)
    }

    fn host(args: &FeatureArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let [rows, hidden, count] = [args.rows, args.hidden, args.count].map(|size| size as usize);
        let features = memory.read::<E>(args.features.cast(), rows * hidden)?;
        let streams = memory.write::<E>(args.streams.cast(), rows * count * hidden)?;
        for (feature, row) in features.chunks_exact(hidden).zip(streams.chunks_exact_mut(count * hidden)) {
            row.chunks_exact_mut(hidden).for_each(|stream| stream.copy_from_slice(feature));
        }
        Ok(())
    }
}
