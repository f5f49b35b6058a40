//! Strings and variants in their serialised form: TensorFlow's bytes, equal values, and no value of
//! broken bytes.

#[rustfmt::skip]
#[allow(missing_docs, clippy::all, clippy::unwrap_used)]
#[path = "../../src/memory/serialized/generated.rs"]
mod generated;

use generated::{TensorProto, TensorShapeProto, VariantTensorDataProto, tensor_shape_proto::Dim};
use proptest::prelude::*;
use prost::Message;
use std::time::{Duration, Instant};
use tensorwire::internals::memory::{FlatTensor, MAX_DEPTH, PagePolicy, PoolOptions, Region, RegionOptions};
use tensorwire::{
    DType, DecodeError, NestedTensor, Pool, SerializeError, Shape, StringTensor, Tensor, TensorMeta, Variant,
    VariantTensor,
};

fn pool(bytes: u64) -> Pool {
    let options = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(bytes) };
    Pool::new(Region::create(0, &options).expect("region"), PoolOptions::default()).expect("pool")
}

fn shape(dims: &[u64]) -> Shape {
    Shape::new(dims).expect("shape")
}

/// A tensor of this type and shape with these bytes as its serialised form.
fn tensor_of(pool: &Pool, dtype: DType, dims: &[u64], bytes: &[u8]) -> Tensor {
    let meta = TensorMeta::serialized(dtype, shape(dims), bytes.len() as u64).expect("meta");
    let mut tensor = pool.tensor(meta).expect("room");
    tensor.bytes_mut().copy_from_slice(bytes);
    tensor.freeze()
}

fn strings(dims: &[u64], values: Vec<Vec<u8>>) -> StringTensor {
    StringTensor::new(shape(dims), values).expect("as many as the shape has")
}

mod witness {
    //! The same tensors as handwritten messages of the .proto: the witness.
    use super::*;

    fn head(dtype: DType, shape: &Shape) -> TensorProto {
        let dim = |size: &u64| Dim { size: *size as i64 };
        let shape = TensorShapeProto { dim: shape.dims().iter().map(dim).collect(), unknown_rank: false };
        TensorProto { dtype: dtype.code().into(), tensor_shape: Some(shape), ..TensorProto::default() }
    }

    pub fn strings(tensor: &StringTensor) -> TensorProto {
        TensorProto { string_val: tensor.values().to_vec(), ..head(DType::String, tensor.shape()) }
    }

    pub fn variants(tensor: &VariantTensor) -> TensorProto {
        let values = tensor.values().iter().map(|variant| VariantTensorDataProto {
            type_name: variant.type_name.clone(),
            metadata: variant.metadata.clone(),
            tensors: variant.tensors.iter().map(nested).collect(),
        });
        TensorProto { variant_val: values.collect(), ..head(DType::Variant, tensor.shape()) }
    }

    fn nested(tensor: &NestedTensor) -> TensorProto {
        match tensor {
            NestedTensor::Strings(tensor) => strings(tensor),
            NestedTensor::Variants(tensor) => variants(tensor),
            NestedTensor::Flat(tensor) => TensorProto {
                tensor_content: tensor.bytes().clone(),
                ..head(tensor.meta().dtype(), tensor.meta().shape())
            },
        }
    }
}

/// The bytes, written by hand from TensorFlow's .proto.
#[test]
fn strings_have_the_bytes_that_tensorflow_gives_them() {
    let tensor = strings(&[2, 1], vec![b"ab".to_vec(), vec![0xff]]).to_tensor(&pool(4096)).expect("room");
    let golden = [
        &[0x08, 7][..],                           // dtype: DT_STRING
        &[0x12, 8, 0x12, 2, 8, 2, 0x12, 2, 8, 1], // tensor_shape: dim { size: 2 } dim { size: 1 }
        &[0x42, 2, b'a', b'b', 0x42, 1, 0xff],    // string_val, twice
    ];
    assert_eq!(tensor.bytes(), golden.concat());
}

#[test]
fn variants_have_the_bytes_that_tensorflow_gives_them() {
    let pool = pool(4096);
    let mut flat = pool.tensor(TensorMeta::new(DType::U16, shape(&[1])).expect("meta")).expect("room");
    flat.fill_from(&[0x0201u16]).expect("one");
    let variant = Variant {
        type_name: "T".into(),
        metadata: vec![9].into(),
        tensors: vec![NestedTensor::Flat(FlatTensor::new(&flat.freeze()).expect("flat"))],
    };
    let tensor = VariantTensor::new(Shape::SCALAR, vec![variant]).expect("one").to_tensor(&pool);
    let inner = [0x08, 17, 0x12, 4, 0x12, 2, 8, 1, 0x22, 2, 1, 2]; // u16[1], tensor_content
    let golden = [
        &[0x08, 21, 0x12, 0][..],               // dtype: DT_VARIANT, the shape of a scalar
        &[0x7a, 20, 0x0a, 1, b'T', 0x12, 1, 9], // variant_val: type_name, metadata
        &[0x1a, 12],                            // tensors
        &inner,
    ];
    assert_eq!(tensor.expect("room").bytes(), golden.concat());
}

#[test]
fn no_strings_and_empty_strings_and_what_is_no_text_come_back() {
    let pool = pool(1 << 16);
    let cases = [
        strings(&[0], vec![]),
        strings(&[3, 0, u64::MAX >> 1], vec![]),
        strings(&[2], vec![vec![], vec![]]),
        strings(&[], vec![(0..=255).collect()]),
        strings(&[1; 254], vec![b"one".to_vec()]),
    ];
    for case in cases {
        let tensor = case.to_tensor(&pool).expect("room");
        assert_eq!((tensor.dtype(), tensor.shape()), (DType::String, case.shape()));
        assert_eq!(tensor.bytes(), witness::strings(&case).encode_to_vec());
        assert_eq!(StringTensor::from_tensor(&tensor), Ok(case));
    }
}

#[test]
fn a_string_is_read_where_it_lies_and_keeps_its_tensor() {
    let pool = pool(1 << 22);
    let large = strings(&[1], vec![vec![7; 1 << 20]]);
    let tensor = large.to_tensor(&pool).expect("room");
    let bytes = tensor.bytes().as_ptr_range();
    let value = StringTensor::from_tensor(&tensor).expect("strings").into_values().remove(0);
    assert!(bytes.contains(&value.as_ptr()));
    drop(tensor);
    assert!(!pool.is_empty());
    assert!(value.iter().all(|byte| *byte == 7));
    drop(value);
    assert!(pool.is_empty());
}

#[test]
fn what_the_pool_has_no_room_for_is_an_error_that_says_so() {
    let large = strings(&[1], vec![vec![7; 1 << 20]]);
    assert!(matches!(large.to_tensor(&pool(1 << 16)), Err(SerializeError::Pool(_))));
}

#[test]
fn there_are_as_many_values_as_the_shape_has_elements() {
    let count = |given, expected| Err(SerializeError::Count { given, expected });
    assert_eq!(StringTensor::new(shape(&[2, 2]), ["a"]).map(|_| ()), count(1, 4));
    assert_eq!(VariantTensor::new(shape(&[2]), vec![]).map(|_| ()), count(0, 2));
    // A shape with too many elements to count never has enough values.
    let endless = shape(&[u64::MAX >> 1, 4]);
    assert_eq!(StringTensor::new(endless, ["a"]).map(|_| ()), count(1, u64::MAX));
}

/// Variants nested `depth` deep.
fn nest(depth: usize) -> Result<VariantTensor, SerializeError> {
    (1..depth).try_fold(VariantTensor::new(shape(&[0]), vec![])?, |inner, _| {
        let variant = Variant { tensors: vec![NestedTensor::Variants(inner)], ..Variant::default() };
        VariantTensor::new(Shape::SCALAR, vec![variant])
    })
}

/// The bytes of variants nested `depth` deep.
fn nested_bytes(depth: usize) -> Vec<u8> {
    wrapped(
        depth - 1,
        TensorProto {
            dtype: 21,
            tensor_shape: Some(TensorShapeProto { dim: vec![Dim { size: 0 }], unknown_rank: false }),
            ..TensorProto::default()
        },
    )
}

/// The bytes of a tensor inside `depth` tensors of variants.
fn wrapped(depth: usize, innermost: TensorProto) -> Vec<u8> {
    let wrap = |inner: TensorProto, _| TensorProto {
        dtype: 21,
        tensor_shape: None,
        variant_val: vec![VariantTensorDataProto { tensors: vec![inner], ..Default::default() }],
        ..TensorProto::default()
    };
    (0..depth).fold(innermost, wrap).encode_to_vec()
}

#[test]
fn variants_nest_as_deep_as_the_bound_and_no_deeper() {
    let pool = pool(1 << 16);
    let deepest = nest(MAX_DEPTH).expect("as deep as may be");
    let tensor = deepest.to_tensor(&pool).expect("room");
    assert_eq!(VariantTensor::from_tensor(&tensor), Ok(deepest));
    assert_eq!(nest(MAX_DEPTH + 1), Err(SerializeError::Depth { max: MAX_DEPTH }));

    let read =
        |depth| VariantTensor::from_tensor(&tensor_of(&pool, DType::Variant, &[], &nested_bytes(depth)));
    assert!(read(MAX_DEPTH).is_ok());
    // Nesting in a peer's bytes causes no deep recursion.
    for depth in (MAX_DEPTH + 1..2 * MAX_DEPTH).chain([1000]) {
        assert_eq!(read(depth), Err(DecodeError::Depth { max: MAX_DEPTH }), "{depth}");
    }
}

#[test]
fn what_is_broken_as_deep_as_may_be_is_not_what_lies_too_deep() {
    let pool = pool(1 << 16);
    let read = |depth, innermost| {
        VariantTensor::from_tensor(&tensor_of(&pool, DType::Variant, &[], &wrapped(depth, innermost)))
    };
    let byte = TensorProto { dtype: 4, tensor_content: vec![7].into(), ..TensorProto::default() };
    assert!(read(MAX_DEPTH, byte.clone()).is_ok());
    assert_eq!(read(MAX_DEPTH + 1, byte), Err(DecodeError::Depth { max: MAX_DEPTH }));
    let broken = TensorProto { dtype: 99, ..TensorProto::default() };
    assert!(matches!(read(MAX_DEPTH, broken), Err(DecodeError::Malformed { .. })));

    // The innermost tensor's type, its first field, is truncated.
    let mut bytes = wrapped(MAX_DEPTH, TensorProto { dtype: 4, ..TensorProto::default() });
    *bytes.last_mut().expect("a type") = 0x84;
    let refused = VariantTensor::from_tensor(&tensor_of(&pool, DType::Variant, &[], &bytes));
    assert!(matches!(refused, Err(DecodeError::Malformed { .. })), "{refused:?}");
}

#[test]
fn what_is_skipped_is_no_deep_recursion_either() {
    let pool = pool(1 << 16);
    // Groups in an unknown field.
    let read = |depth: usize| {
        let groups = [[0xa3, 1].repeat(depth), [0xa4, 1].repeat(depth)].concat();
        let bytes = [&[8, 7, 0x12, 2, 0x12, 0][..], &groups].concat();
        StringTensor::from_tensor(&tensor_of(&pool, DType::String, &[0], &bytes))
    };
    assert!(read(3).is_ok());
    let refused = read(1000).expect_err("refused");
    assert!(
        matches!(&refused, DecodeError::Malformed { what } if what.contains("recursion limit")),
        "{refused}"
    );
}

#[test]
fn many_variants_inside_each_other_are_written_and_read_in_little_time() {
    let pool = pool(1 << 24);
    let wide = |inner: VariantTensor| {
        let variant = Variant { tensors: vec![NestedTensor::Variants(inner); 8], ..Variant::default() };
        VariantTensor::new(Shape::SCALAR, vec![variant]).expect("one")
    };
    let tree = (0..5).fold(VariantTensor::new(shape(&[0]), vec![]).expect("none"), |inner, _| wide(inner));
    let deep = (0..20).fold(tree, |inner, _| {
        let variant = Variant { tensors: vec![NestedTensor::Variants(inner)], ..Variant::default() };
        VariantTensor::new(Shape::SCALAR, vec![variant]).expect("one")
    });
    let start = Instant::now();
    let tensor = deep.to_tensor(&pool).expect("room");
    assert_eq!(VariantTensor::from_tensor(&tensor), Ok(deep));
    // Doubling the work at each level would take days.
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn bytes_that_are_no_such_tensor_are_refused_with_the_reason() {
    let pool = pool(1 << 16);
    let read = |dims: &[u64], bytes: &[u8]| {
        let error = StringTensor::from_tensor(&tensor_of(&pool, DType::String, dims, bytes));
        error.expect_err("refused").to_string()
    };
    let cases: [(&[u64], &[u8], &str); 19] = [
        (&[], &[], "the serialised form is no tensor: a tensor has no element type"),
        (&[], &[8, 99], "no element type that there is: 99"),
        (&[], &[8, 7], "0 values for 1 elements"),
        (&[0], &[8, 7, 0x12, 4, 0x12, 2, 8, 1], "the shape [1], the tensor [0]"),
        (&[0], &[8, 3, 0x12, 2, 0x12, 0], "a tensor of i32 was read as one of string"),
        (&[0], &[8, 7, 0x12, 9, 0x12, 0], "TensorProto.tensor_shape: buffer underflow"),
        (&[], &[8, 7, 0x42, 0xff, 0xff, 0xff, 0xff, 0x7f], "TensorProto.string_val: buffer underflow"),
        (&[0], &[8, 7, 0x12, 3, 0x12, 2, 8, 1], "TensorProto.tensor_shape: delimited length exceeded"),
        (&[0], &[8, 7, 0x12, 4, 0x18, 1, 0x12, 0], "rank is not known"),
        (&[0], &[8, 7, 0x1d, 0, 0, 0], "ThirtyTwoBit (expected Varint)"),
        (&[0], &[8, 7, 0xa5, 1, 0, 0, 0], "buffer underflow"),
        (&[], &[8, 7, 0x40, 1], "Varint (expected LengthDelimited)"),
        (&[], &[0x0a, 1, 7], "LengthDelimited (expected Varint)"),
        (&[], &[8, 7, 0x43], "StartGroup (expected LengthDelimited)"),
        (&[], &[8, 7, 0x47], "invalid wire type value: 7"),
        (&[], &[0, 7], "invalid tag value: 0"),
        (&[], &[8, 0x87], "TensorProto.dtype: invalid varint"),
        (&[], &[8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 2], "TensorProto.dtype: invalid varint"),
        (&[0], &[8, 7, 0x12, 13, 0x12, 11, 8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1], "is negative"),
    ];
    for (dims, bytes, part) in cases {
        let said = read(dims, bytes);
        assert!(said.contains(part), "{bytes:?}: {said}");
    }
    let many = [&[8, 7, 0x12, 0xfe, 3][..], &[0x12, 0].repeat(255)].concat();
    assert!(read(&[0], &many).contains("254 dimensions"));
    let text = [&[8, 21, 0x7a, 3, 0x0a, 1, 0xff][..]].concat();
    let refused = VariantTensor::from_tensor(&tensor_of(&pool, DType::Variant, &[], &text));
    assert!(refused.expect_err("no text").to_string().contains("UTF-8"));
    let short = [8, 21, 0x7a, 6, 0x1a, 4, 8, 1, 0x22, 0];
    let refused = VariantTensor::from_tensor(&tensor_of(&pool, DType::Variant, &[], &short));
    assert_eq!(refused, Err(DecodeError::Count { given: 0, expected: 4 }));
}

#[test]
fn values_of_another_kind_are_refused_and_not_dropped_in_silence() {
    let pool = pool(4096);
    let head = |code| [8, code, 0x12, 4, 0x12, 2, 8, 1].to_vec();
    // Fields 4, 5, 7 and 18.
    let fields: [&[u8]; 4] = [&[0x22, 1, 9], &[0x2d, 0, 0, 128, 63], &[0x38, 5], &[0x90, 1, 1]];
    let (string, variant): (&[u8], &[u8]) = (&[0x42, 1, b'x'], &[0x7a, 0]);
    let read = |dtype, parts: &[&[u8]]| {
        let tensor = tensor_of(&pool, dtype, &[1], &parts.concat());
        match dtype {
            DType::String => StringTensor::from_tensor(&tensor).map(|_| ()),
            _ => VariantTensor::from_tensor(&tensor).map(|_| ()),
        }
    };
    for (dtype, code, own, other) in
        [(DType::String, 7, string, variant), (DType::Variant, 21, variant, string)]
    {
        let head = &head(code)[..];
        assert_eq!(read(dtype, &[head, own]), Ok(()));
        for field in fields.into_iter().chain([other]) {
            for parts in [[head, own, field], [field, head, own]] {
                let said = read(dtype, &parts).expect_err("refused").to_string();
                assert!(said.contains(&format!("a tensor of {dtype} has values of another kind")), "{said}");
            }
        }
    }
}

#[test]
fn a_tensor_of_another_type_is_not_read() {
    let pool = pool(4096);
    let words = strings(&[0], vec![]).to_tensor(&pool).expect("room");
    let other = DecodeError::DType { have: DType::String, want: DType::Variant };
    assert_eq!(VariantTensor::from_tensor(&words), Err(other));
    assert_eq!(FlatTensor::new(&words), Err(SerializeError::NotFlat { dtype: DType::String }));
    let flat = pool.zeroed(TensorMeta::new(DType::U8, shape(&[4])).expect("meta")).expect("room").freeze();
    let other = DecodeError::DType { have: DType::U8, want: DType::String };
    assert_eq!(StringTensor::from_tensor(&flat), Err(other));
}

#[test]
fn fields_that_are_not_known_are_skipped_and_order_does_not_matter() {
    let pool = pool(4096);
    let bytes = [
        &[0x42, 1, b'x'][..],                     // string_val
        &[0xad, 1, 1, 2, 3, 4],                   // a fixed32 in field 21
        &[0xb3, 1, 8, 1, 0xb4, 1],                // a group in field 22
        &[0x12, 4, 0x12, 2, 8, 1],                // tensor_shape
        &[0xa1, 1, 1, 2, 3, 4, 5, 6, 7, 8],       // a fixed64 in field 20
        &[0x12, 6, 0x12, 4, 0x12, 0, 8, 1, 8, 9], // the rest of the shape, dim with a name; dtype
        &[8, 7],                                  // dtype again: the last one counts
    ];
    let read = StringTensor::from_tensor(&tensor_of(&pool, DType::String, &[1, 1], &bytes.concat()));
    assert_eq!(read.expect("strings").values(), ["x"]);
}

fn any_shape(count: usize) -> BoxedStrategy<Vec<u64>> {
    let n = count as u64;
    prop_oneof![Just(vec![n]), Just(vec![1, n, 1]), Just(vec![n, 1])].boxed()
}

fn any_strings() -> impl Strategy<Value = StringTensor> {
    let values = proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..20);
    values
        .prop_flat_map(|values| any_shape(values.len()).prop_map(move |dims| strings(&dims, values.clone())))
}

fn any_flat() -> impl Strategy<Value = NestedTensor> {
    let pool = pool(1 << 20);
    proptest::collection::vec(any::<u64>(), 0..20).prop_map(move |values| {
        let meta = TensorMeta::new(DType::U64, shape(&[values.len() as u64])).expect("meta");
        let mut tensor = pool.tensor(meta).expect("room");
        tensor.fill_from(&values).expect("as many");
        NestedTensor::Flat(FlatTensor::new(&tensor.freeze()).expect("flat"))
    })
}

fn any_variants() -> impl Strategy<Value = VariantTensor> {
    let leaf = prop_oneof![any_flat(), any_strings().prop_map(NestedTensor::Strings)];
    let nested = leaf
        .prop_recursive(4, 24, 4, |inner| any_variants_of(inner.boxed()).prop_map(NestedTensor::Variants));
    any_variants_of(nested.boxed())
}

fn any_variants_of(tensors: BoxedStrategy<NestedTensor>) -> impl Strategy<Value = VariantTensor> {
    let name = prop_oneof![Just(String::new()), Just("tensorflow::Tensor".to_owned()), Just("né".to_owned())];
    let metadata = proptest::collection::vec(any::<u8>(), 0..40);
    let variant = (name, metadata, proptest::collection::vec(tensors, 0..3))
        .prop_map(|(type_name, metadata, tensors)| Variant { type_name, metadata: metadata.into(), tensors });
    proptest::collection::vec(variant, 0..3).prop_map(|values| {
        VariantTensor::new(shape(&[values.len() as u64]), values).expect("as many as the shape has")
    })
}

proptest! {
    #[test]
    fn strings_come_back_and_have_the_witness_bytes(tensor in any_strings()) {
        let encoded = tensor.to_tensor(&pool(1 << 16)).expect("room");
        prop_assert_eq!(encoded.bytes(), witness::strings(&tensor).encode_to_vec());
        prop_assert_eq!(StringTensor::from_tensor(&encoded), Ok(tensor));
    }

    #[test]
    fn variants_come_back_and_have_the_witness_bytes(tensor in any_variants()) {
        let encoded = tensor.to_tensor(&pool(1 << 20)).expect("room");
        prop_assert_eq!(encoded.bytes(), witness::variants(&tensor).encode_to_vec());
        prop_assert_eq!(VariantTensor::from_tensor(&encoded), Ok(tensor));
    }

    /// From bytes with an error nothing is read that the witness does not read too.
    #[test]
    fn broken_variants_are_refused_or_read_as_the_witness_reads_them(
        tensor in any_variants(), place in any::<prop::sample::Index>(), value in any::<u8>(),
        cut in any::<bool>(),
    ) {
        let mut bytes = witness::variants(&tensor).encode_to_vec();
        let place = place.index(bytes.len());
        match cut {
            true => bytes.truncate(place),
            false => bytes[place] = value,
        }
        let broken = tensor_of(&pool(1 << 20), DType::Variant, tensor.shape().dims(), &bytes);
        if let Ok(read) = VariantTensor::from_tensor(&broken) {
            let mut said = TensorProto::decode(&*bytes).expect("the witness reads what was read");
            said.version_number = 0;
            plain(&mut said);
            prop_assert_eq!(witness::variants(&read), said);
        }
    }
}

/// Removes the fields that a reader of such a tensor ignores.
fn plain(proto: &mut TensorProto) {
    let dtype = DType::from_code(proto.dtype as u8).expect("read");
    proto.version_number = 0;
    proto.tensor_shape.get_or_insert_default();
    if dtype != DType::String {
        proto.string_val.clear();
    }
    if dtype != DType::Variant {
        proto.variant_val.clear();
    }
    if dtype.size().is_none() {
        proto.tensor_content.clear();
    }
    proto.variant_val.iter_mut().flat_map(|variant| &mut variant.tensors).for_each(plain);
}
