//! The n-gram hash against recorded vectors of the reference implementation: every id is exact.

use std::fs;
use std::path::PathBuf;

use kernels::hash::{NgramHash, NgramShape};
use runtime::config::ModelConfig;
use safetensors::SafeTensors;
use serde_json::Value;
use tests::fixture::repository;

/// The published model.
const FLASH_NEXT: NgramShape = NgramShape {
    vocab_size: 248320,
    boundary: 248044,
    ngram_size: 3,
    heads_per_ngram: 8,
    vocab_base: 20_000_000,
    divisible_by: 128,
    seed: 1234,
};

/// A prompt of the published model from its start: id, then the row of each head.
const PROMPT: [(u32, [u64; 16]); 14] = [
    (
        1,
        [
            16121432, 28938500, 59087997, 73487090, 81148277, 104500129, 120276032, 149373875, 176283436,
            184305849, 216528839, 231080079, 257961536, 266068568, 289043455, 305959965,
        ],
    ),
    (
        1000,
        [
            18188074, 34686009, 52952758, 74546108, 84501725, 107824115, 122811195, 149467298, 168928873,
            195349780, 218005115, 222170770, 249184118, 276559644, 292432023, 312397055,
        ],
    ),
    (
        151,
        [
            9056385, 20396066, 56081951, 66060058, 88915113, 103203567, 124639452, 153226616, 166201305,
            192597646, 206746051, 221570802, 244809387, 268051818, 295800310, 314548214,
        ],
    ),
    (
        248044,
        [
            18408052, 23509837, 40469161, 65149644, 82317651, 108980843, 129857256, 146004902, 163779821,
            194495709, 209011855, 225077035, 251541813, 279064385, 281806920, 317282736,
        ],
    ),
    (
        9,
        [
            18043673, 37626835, 51159316, 78294604, 94015356, 106720349, 136526052, 144330141, 176817901,
            186368539, 203707490, 230017629, 247662678, 266533413, 293096193, 307951937,
        ],
    ),
    (
        248044,
        [
            2701124, 21500242, 55309614, 75581644, 88972381, 114376771, 133365251, 146996157, 165401374,
            190070589, 200378572, 238673325, 251103114, 264494349, 289171909, 314161324,
        ],
    ),
    (
        248044,
        [
            9663979, 26558231, 56120240, 74755659, 80459717, 109265651, 132697467, 151022725, 170054832,
            192967038, 200687722, 225763581, 259275737, 272983544, 297596484, 300986548,
        ],
    ),
    (
        5,
        [
            15389869, 39778609, 55713969, 62213332, 88817728, 118483999, 133731511, 155458159, 179763390,
            197956758, 205378969, 220499474, 242466248, 265658744, 293662119, 315720898,
        ],
    ),
    (
        6,
        [
            15567690, 35687509, 55747620, 67831959, 83904455, 115928743, 123965091, 148013673, 164414634,
            193473829, 212527239, 232037623, 240342494, 269007074, 298641997, 307414745,
        ],
    ),
    (
        7,
        [
            9319853, 32980418, 54810932, 61373850, 95570932, 100303321, 137402047, 146866965, 160487518,
            192851935, 200610520, 228493582, 254676383, 260859079, 296253588, 313224935,
        ],
    ),
    (
        248056,
        [
            7033384, 20387938, 51475208, 79936525, 86061095, 102376779, 127732299, 143185974, 161667687,
            185649550, 202312390, 235957534, 249061475, 263223798, 294846649, 314723757,
        ],
    ),
    (
        248056,
        [
            16982399, 34740182, 54733895, 75973670, 98195745, 119174304, 120865008, 143535541, 175808735,
            187243677, 215270518, 231945093, 240471962, 269266548, 285590923, 307658255,
        ],
    ),
    (
        248056,
        [
            16982399, 34740182, 54733895, 75973670, 98195745, 119174304, 120865008, 143535541, 168080783,
            195121389, 200991716, 226494397, 242070342, 277842220, 296476407, 309972988,
        ],
    ),
    (
        248054,
        [
            16752472, 37437132, 48894252, 66182782, 82160902, 107724825, 136293644, 148134836, 175511103,
            185059439, 203855690, 237718561, 244548527, 271574438, 280626585, 306213479,
        ],
    ),
];

#[test]
fn the_published_model_has_the_published_constants() {
    let hash = NgramHash::new(&FLASH_NEXT, 0);
    assert_eq!(hash.multipliers, [23703573157769, 20109073645365, 8052911324071]);
    assert_eq!(
        hash.primes,
        [
            20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077, 20000081,
            20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171
        ]
    );
    assert_eq!(hash.offsets[..4], [0, 20000003, 40000026, 60000059]);
    assert_eq!(hash.offsets[15], 300001275);
    assert_eq!(hash.rows_padded, 320_001_536);
}

#[test]
fn a_recorded_prompt_reads_the_recorded_rows() {
    let hash = NgramHash::new(&FLASH_NEXT, 0);
    let ids: Vec<u32> = PROMPT.iter().map(|(id, _)| *id).collect();
    for (at, (id, expected)) in PROMPT.iter().enumerate() {
        assert_eq!(rows(&hash, *id, &ids[..at]), expected, "position {at}");
    }
}

#[test]
fn only_the_last_predecessors_matter_and_a_missing_one_is_the_boundary() {
    let hash = NgramHash::new(&FLASH_NEXT, 0);
    let boundary = FLASH_NEXT.boundary;
    assert_eq!(rows(&hash, 9, &[1, 2, 3, 4]), rows(&hash, 9, &[3, 4]));
    assert_ne!(rows(&hash, 9, &[2, 4]), rows(&hash, 9, &[3, 4]));
    assert_eq!(rows(&hash, 9, &[]), rows(&hash, 9, &[boundary, boundary]));
    assert_eq!(rows(&hash, 9, &[7, boundary]), rows(&hash, 9, &[]), "the boundary hides what is behind it");
    assert_ne!(rows(&hash, boundary, &[7]), rows(&hash, boundary, &[]), "but not from itself");
}

#[test]
fn the_largest_id_does_not_overflow() {
    let last = FLASH_NEXT.vocab_size - 1;
    for ordinal in 0..4 {
        let hash = NgramHash::new(&FLASH_NEXT, ordinal);
        assert!(
            hash.multipliers
                .iter()
                .all(|&m| m % 2 == 1
                    && m.checked_mul(u64::from(last)).is_some_and(|product| product < 1 << 63))
        );
        assert!(rows(&hash, last, &[last, last]).iter().all(|&row| row < hash.rows_padded));
    }
}

#[test]
#[should_panic(expected = "id 248320 is outside the vocabulary of 248320")]
fn an_id_outside_the_vocabulary_is_refused() {
    rows(&NgramHash::new(&FLASH_NEXT, 0), 248320, &[]);
}

#[test]
fn recorded_sequences_of_small_models_read_the_recorded_rows() {
    let mut tables = 0;
    for case in cases("ngram_ids") {
        let dir = oracle().join("checkpoints").join(case["checkpoint"].as_str().unwrap());
        let config = ModelConfig::open(&dir).unwrap();
        assert_eq!(case["eos"], config.boundary);
        for &ple in &config.ple {
            check(&case, ple.layer, &config.ngram_hash(ple).unwrap(), config.boundary);
            tables += 1;
        }
    }
    assert_eq!(tables, 5, "all tables of all cases were compared");
}

#[test]
fn recorded_sequences_of_the_published_model_read_the_recorded_rows() {
    let cases = cases("ngram_ids_real_scale");
    assert_eq!(cases.len(), 1);
    check(&cases[0], 1, &NgramHash::new(&FLASH_NEXT, 0), FLASH_NEXT.boundary);
}

/// Compares a table's constants, and its rows for every recorded sequence.
fn check(case: &Value, layer: usize, hash: &NgramHash, boundary: u32) {
    let bytes = fs::read(oracle().join(case["expected"].as_str().unwrap())).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let recorded = |name: &str| integers(&file, &format!("layer.{layer}.{name}"));
    let unsigned = |name: &str| recorded(name).into_iter().map(|n| n as u64).collect::<Vec<_>>();
    assert_eq!(hash.multipliers, unsigned("layer_multipliers"));
    assert_eq!(hash.primes, unsigned("head_vocab_sizes"));
    assert_eq!(hash.offsets, unsigned("head_offsets"));
    assert_eq!([hash.rows_padded], unsigned("table_rows")[..]);

    let sequences = case["sequences"].as_object().unwrap();
    assert!(sequences.len() >= 10 && sequences.contains_key("eos_every_other"));
    for name in sequences.keys() {
        let ids: Vec<u32> = integers(&file, &format!("seq.{name}")).into_iter().map(|id| id as u32).collect();
        let expected = unsigned(&format!("{name}.ids"));
        assert_eq!(expected.len(), ids.len() * hash.heads());
        for (at, expected) in expected.chunks(hash.heads()).enumerate() {
            assert_eq!(rows(hash, ids[at], &ids[..at]), expected, "{name}, position {at}");
            // What a running sequence carries: the last ids, padded with the boundary.
            let carried = [2, 1].map(|back| at.checked_sub(back).map_or(boundary, |at| ids[at]));
            assert_eq!(rows(hash, ids[at], &carried), expected, "{name}, position {at}, from carried ids");
        }
    }
}

fn rows(hash: &NgramHash, current: u32, previous: &[u32]) -> Vec<u64> {
    let mut rows = vec![u64::MAX; hash.heads()];
    hash.rows(current, previous, &mut rows);
    rows
}

fn integers(file: &SafeTensors<'_>, name: &str) -> Vec<i64> {
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), safetensors::Dtype::I64);
    tensor.data().as_chunks().0.iter().map(|word| i64::from_le_bytes(*word)).collect()
}

fn cases(kind: &str) -> Vec<Value> {
    let manifest: Value = serde_json::from_slice(&fs::read(oracle().join("manifest.json")).unwrap()).unwrap();
    manifest["cases"].as_array().unwrap().iter().filter(|case| case["kind"] == kind).cloned().collect()
}

fn oracle() -> PathBuf {
    repository("tests/oracle")
}
