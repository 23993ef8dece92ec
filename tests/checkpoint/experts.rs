//! Routed experts stored stacked or one by one are the same experts.

use runtime::checkpoint::layout::{Experts, Matrix};
use runtime::checkpoint::{Checkpoint, Dtype};

use crate::folder::{Folder, Tensor, Tensors, WEIGHTS};

const MATRICES: [(Matrix, &str); 3] =
    [(Matrix::Gate, "gate_proj"), (Matrix::Up, "up_proj"), (Matrix::Down, "down_proj")];

#[test]
fn splitting_and_fusing_experts_changes_nothing() {
    for (name, experts) in [("base_bf16", 8), ("base_fp32", 6), ("ratio2_oddheads", 8)] {
        let before = Folder::copy_of(name);
        let after = Folder::copy_of(name);
        let layers = before.open().config.num_hidden_layers;
        after.edit(WEIGHTS, |tensors| {
            for layer in 0..layers {
                let at = format!("model.language_model.layers.{layer}.mlp.experts.");
                if tensors.contains_key(&format!("{at}down_proj")) {
                    split(tensors, &at);
                } else {
                    fuse(tensors, &at, experts);
                }
            }
        });
        let (before, after) = (before.open(), after.open());
        for (a, b) in before.layout.layers.iter().zip(&after.layout.layers) {
            let (a, b) = (&a.moe.experts, &b.moe.experts);
            assert_ne!(matches!(a, Experts::Fused { .. }), matches!(b, Experts::Fused { .. }), "{name}");
            for expert in 0..experts {
                for (matrix, _) in MATRICES {
                    let one = read(&before, a, expert, matrix);
                    assert_eq!(one, read(&after, b, expert, matrix), "{name} {expert} {matrix:?}");
                    assert!(one.iter().any(|&byte| byte != 0));
                }
            }
        }
    }
}

#[test]
fn a_layer_may_choose_its_form_but_not_mix_both() {
    let folder = Folder::copy_of("base_bf16");
    let at = "model.language_model.layers.2.mlp.experts.";
    folder.edit(WEIGHTS, |tensors| fuse(tensors, at, 8));
    let layers = folder.open().layout.layers;
    assert!(matches!(layers[2].moe.experts, Experts::Fused { .. }));
    assert!(matches!(layers[1].moe.experts, Experts::Split(_)));

    folder.edit(WEIGHTS, |tensors| split_one(tensors, at, 5));
    folder.refused(&["left over 3", &format!("{at}5.gate_proj.weight")]);
    folder.edit(WEIGHTS, |tensors| drop(tensors.remove(&format!("{at}gate_up_proj"))));
    folder.refused(&["missing 1", &format!("{at}gate_up_proj"), "left over 3"]);
}

#[test]
fn an_expert_read_into_the_wrong_size_is_refused() {
    let checkpoint = Folder::copy_of("ratio2_oddheads").open();
    let experts = &checkpoint.layout.layers[0].moe.experts;
    let error =
        checkpoint.read_expert(experts, 1, Matrix::Up, &mut [0; 16 * 64 * 2 - 1]).unwrap_err().to_string();
    assert!(error.contains("2047 bytes") && error.contains("layers.0.mlp.experts.gate_up_proj"), "{error}");
}

fn read(checkpoint: &Checkpoint, experts: &Experts, expert: usize, matrix: Matrix) -> Vec<u8> {
    let place = experts.place(expert, matrix);
    let size = if checkpoint.expect(place.spec).dtype == Dtype::F32 { 4 } else { 2 };
    let mut bytes = vec![0; place.elements * size];
    checkpoint.read_expert(experts, expert, matrix, &mut bytes).unwrap();
    bytes
}

fn fuse(tensors: &mut Tensors, at: &str, experts: usize) {
    let mut take =
        |expert: usize, matrix: &str| tensors.remove(&format!("{at}{expert}.{matrix}.weight")).unwrap();
    let parts: Vec<[Tensor; 3]> = (0..experts).map(|e| MATRICES.map(|(_, name)| take(e, name))).collect();
    let [gate, _, down] = &parts[0];
    let (width, hidden, dtype) = (gate.shape[0], gate.shape[1], down.dtype);
    let stack = |shape: Vec<usize>, pick: &dyn Fn(&[Tensor; 3]) -> Vec<u8>| Tensor {
        dtype,
        shape,
        data: parts.iter().flat_map(pick).collect(),
    };
    let both = stack(vec![experts, 2 * width, hidden], &|[gate, up, _]| [&gate.data[..], &up.data].concat());
    let down = stack(vec![experts, hidden, width], &|[.., down]| down.data.clone());
    tensors.extend([(format!("{at}gate_up_proj"), both), (format!("{at}down_proj"), down)]);
}

fn split(tensors: &mut Tensors, at: &str) {
    for expert in 0..tensors[&format!("{at}down_proj")].shape[0] {
        split_one(tensors, at, expert);
    }
    tensors.retain(|name, _| *name != format!("{at}down_proj") && *name != format!("{at}gate_up_proj"));
}

/// Adds one expert of the stacked form in the other form.
fn split_one(tensors: &mut Tensors, at: &str, expert: usize) {
    let down = &tensors[&format!("{at}down_proj")];
    let both = &tensors[&format!("{at}gate_up_proj")];
    let [hidden, width] = [down.shape[1], down.shape[2]];
    let bytes = down.data.len() / down.shape[0];
    let slice = |from: &Tensor, number: usize, shape: [usize; 2]| Tensor {
        dtype: from.dtype,
        shape: shape.to_vec(),
        data: from.data[number * bytes..(number + 1) * bytes].to_vec(),
    };
    let parts = [
        slice(both, 2 * expert, [width, hidden]),
        slice(both, 2 * expert + 1, [width, hidden]),
        slice(down, expert, [hidden, width]),
    ];
    for ((_, name), part) in MATRICES.iter().zip(parts) {
        tensors.insert(format!("{at}{expert}.{name}.weight"), part);
    }
}
